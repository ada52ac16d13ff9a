"""The benchmarks are run by hand, some on machines that are not here: they have to find what they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "offload" in names
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
