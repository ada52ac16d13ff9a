"""The blocks of the documents about DeepSpeed run, in the environment that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_documents import test_code_blocks_run as check


@pytest.mark.parametrize("document", ["docs/deepspeed.md", "docs/migration/deepspeed.md"])
def test_the_document_runs(document: str, tmp_path: Path) -> None:
    check(document, tmp_path)
