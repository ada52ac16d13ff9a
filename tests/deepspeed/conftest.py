"""The real DeepSpeed on a CPU, with what it compiles kept in the environment: see `build_ops.py`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed asks for ninja, even when all is compiled already.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", "")])

_COMPILED = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(sys.prefix, "torch_extensions")))


def pytest_configure() -> None:
    """Give each worker a copy of what was compiled, dates and all, so that nothing is compiled again."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    own = _COMPILED if worker is None else _COMPILED.with_name(f"{_COMPILED.name}-{worker}")
    if own != _COMPILED:
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(_COMPILED, own, ignore=shutil.ignore_patterns("lock"))
    os.environ["TORCH_EXTENSIONS_DIR"] = str(own)


@pytest.fixture(autouse=True)
def no_lock_of_the_dead() -> None:
    """A process that a test kills while it loads what was compiled leaves a lock behind, which others wait for."""
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
        lock.unlink(missing_ok=True)
