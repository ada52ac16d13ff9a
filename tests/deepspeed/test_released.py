"""This package beside the released one, both on the real DeepSpeed: filled configs, losses, each other's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import accelerate
from tests.deepspeed import either_package

OURS = Path(accelerate.__file__).parents[1]
RELEASED = Path(sys.prefix, "released")
ROOT = Path(__file__).parents[2]


def run(package: Path, folder: Path, **paths: Path) -> list[dict[str, Any]]:
    """What both processes of a run have found. package: the folder that has it."""
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
    answers = folder / "{rank}.json"
    options = [f"--{name}={path}" for name, path in paths.items()]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launcher, either_package.__file__, str(answers), *options]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(Path(str(answers).format(rank=rank)).read_text()) for rank in range(2)]


@pytest.mark.skipif(not RELEASED.exists(), reason="needs the released package beside the environment: make deepspeed")
def test_as_the_released_package(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    expected = run(RELEASED, tmp_path, writes=theirs)
    found = run(OURS, tmp_path, writes=ours, reads=theirs)
    read = run(RELEASED, tmp_path, reads=ours)
    for rank in range(2):
        for name, config in expected[rank]["filled"].items():
            assert found[rank]["filled"][name] == config, name
        losses = expected[rank]["losses"]
        assert found[rank]["losses"] == losses
        assert found[rank]["read"] == read[rank]["read"] == [each[2:] for each in losses]
