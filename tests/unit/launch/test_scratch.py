"""The folder of a launcher goes with it, also when it is killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from accelerate.launch.scratch import scratch_folder

KILLED = """
import os, signal
from accelerate.launch.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "note").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_launcher_leaves_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as ours:
        subprocess.run([sys.executable, "-c", KILLED], env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)})
        assert len(list(tmp_path.iterdir())) == 2
        (tmp_path / "accelerate-launch-begun").mkdir()  # by one that has not yet come to its lock
        with scratch_folder() as other:
            assert set(tmp_path.iterdir()) == {ours, other, tmp_path / "accelerate-launch-begun"}
        assert ours.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["accelerate-launch-begun"]
