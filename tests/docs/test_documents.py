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
# What documents need that not every environment of the tests has, and how to get it.
NEEDS = {
    "docs/deepspeed.md": ("deepspeed", "make deepspeed"),
    "docs/migration/deepspeed.md": ("deepspeed", "make deepspeed"),
    "docs/megatron.md": ("megatron", "make megatron"),
    "docs/tpu.md": ("torch_xla", "make xla"),
    "docs/migration/fabric.md": ("lightning_fabric", "pip install lightning-fabric"),
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_blocks_run(document: str, tmp_path: Path) -> None:
    package, remedy = NEEDS.get(document, ("accelerate", ""))
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: {remedy}")
    blocks = read_blocks(ROOT / document, document)
    check_examples(blocks)
    run_blocks(blocks, tmp_path)
