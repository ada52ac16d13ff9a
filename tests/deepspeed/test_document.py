"""The blocks of the document about DeepSpeed run, in the environment that has it."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_documents import test_code_blocks_run as check


def test_the_document_runs(tmp_path: Path) -> None:
    check("docs/deepspeed.md", tmp_path)
