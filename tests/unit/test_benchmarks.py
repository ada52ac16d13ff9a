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


def test_the_peer_may_be_named_as_it_is_typed(tmp_path: Path) -> None:
    """Subjects run in folders of their own: a path from here means nothing there."""
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    code = "import harness, os; os.chdir(r'{}'); print(*map(harness.interpreter, ['./python', 'sh', '']), sep='|')"
    done = subprocess.run(
        [sys.executable, "-c", code.format(tmp_path)], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    relative, found, none = done.stdout.rstrip("\n").split("|")
    assert Path(relative) == tmp_path / "python"
    assert Path(found).is_absolute() and Path(found).name == "sh"
    assert none == ""
