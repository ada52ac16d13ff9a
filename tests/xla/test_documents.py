"""The blocks of documents run on an XLA device: those of its own, and the loop that is for every device."""

from __future__ import annotations

from pathlib import Path

from tests.docs.blocks import in_runs, read_blocks
from tests.docs.runner import PLAIN_PROCESS, run_python
from tests.docs.test_documents import ROOT
from tests.docs.test_documents import test_code_blocks_run as check
from tests.harness import run_world
from tests.xla.worlds import on_several


def test_the_document_runs(tmp_path: Path) -> None:
    check("docs/tpu.md", tmp_path)


def test_the_loop_of_every_device(tmp_path: Path) -> None:
    document = "docs/training-loop.md"
    here = PLAIN_PROCESS | {"ACCELERATE_USE_CPU": None}
    runs = list(in_runs(read_blocks(ROOT / document, document)))
    assert {run[0].world for run in runs} == {0, 2}
    for run in runs:
        if run[0].world:
            on_several(run_python, run, processes=run[0].world)
        else:
            run_world(run_python, 1, run, env=here, cwd=tmp_path, timeout=200)
