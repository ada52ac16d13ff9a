"""Every code block of the documents does what the document says: it runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.blocks import read_blocks
from tests.docs.runner import check_examples, run_blocks

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    if path.exists()
]
# What a document needs that has an environment, and a target of the Makefile, of its own.
ELSEWHERE = {"docs/deepspeed.md": "deepspeed"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_blocks_run(document: str, tmp_path: Path) -> None:
    if document in ELSEWHERE and find_spec(ELSEWHERE[document]) is None:
        pytest.skip(f"needs {ELSEWHERE[document]}: make {ELSEWHERE[document]}")
    blocks = read_blocks(ROOT / document, document)
    check_examples(blocks)
    run_blocks(blocks, tmp_path)
