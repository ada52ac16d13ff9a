"""The notebook, in a real kernel."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.examples.running import EXAMPLES, assert_learned
from tests.harness.notebook import run_notebook


def test_on_one_process_and_on_two(tmp_path: Path) -> None:
    cells = run_notebook(Path(shutil.copy(EXAMPLES / "notebook.ipynb", tmp_path)), {"OMP_NUM_THREADS": "1"})
    assert [cell["error"] for cell in cells] == [None] * len(cells)
    *_, alone, together, loaded = (cell["text"].strip().rpartition("\n")[2] for cell in cells)
    assert alone.startswith("1 process(es); accuracy rose")
    assert together.startswith("2 process(es); accuracy rose")
    _, trained = assert_learned(together)
    assert loaded == f"here: accuracy {trained:.3f}"
