"""The blocks of documents run on an XLA device: those of its own, and the loop that is for every device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_documents import test_code_blocks_run as check


@pytest.mark.parametrize("document", ["docs/tpu.md"])
def test_the_document_runs(document: str, tmp_path: Path) -> None:
    check(document, tmp_path)
