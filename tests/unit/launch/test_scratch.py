"""The folder of a launcher goes with it, also when it is killed."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from accelerate.launch import scratch
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
        begun = ours.with_name(f"{ours.name}-begun")  # by one that has not yet come to its lock
        elsewhere = tmp_path / "accelerate-launch-another@1"  # of a machine whose locks are not seen here
        for folder in (begun, elsewhere):
            folder.mkdir()
        (elsewhere / "lock").touch()
        with scratch_folder() as other:
            assert set(tmp_path.iterdir()) == {ours, other, begun, elsewhere}
        assert ours.is_dir()
    assert set(tmp_path.iterdir()) == {begun, elsewhere}


def test_a_folder_is_swept_only_when_its_launcher_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    take = fcntl.flock

    def sweep_before(file: int, how: int) -> None:
        """Another launcher starts just before a new folder is locked."""
        monkeypatch.setattr(fcntl, "flock", take)
        scratch._sweep()
        take(file, how)

    monkeypatch.setattr(fcntl, "flock", sweep_before)
    with scratch_folder() as folder:
        scratch._sweep()
        assert folder.is_dir()
