"""Every tracker against its real library, offline: what it wrote to disk is what was logged."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# How to keep each library off the network.
OFFLINE: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "aim": ({}, {}),
    "clearml": ({"CLEARML_OFFLINE_MODE": "1", "CLEARML_CONFIG_FILE": str(HERE / "clearml.conf")}, {}),
    "comet_ml": ({}, {"online": False}),
    "dvclive": ({}, {"save_dvc_exp": False}),
    "mlflow": ({"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}, {}),
    "swanlab": ({}, {"mode": "offline"}),
    "tensorboard": ({}, {}),
    "trackio": ({"TRACKIO_DIR": "trackio"}, {}),
    "wandb": ({"WANDB_MODE": "offline"}, {}),
}
NAMES = sorted(OFFLINE)

SCALARS = {
    "loss": [[0, 1], [1, 2], [2, 3]],
    "accuracy": [[0, 0], [1, 0.25], [2, 0.5]],
    "count": [[0, 0], [1, 1], [2, 2]],
}
CONFIG = {"learning_rate": 0.1, "batch_size": 4, "model": "small", "layers": [1, 2]}


def require(name: str) -> None:
    """`make trackers` wants every library; elsewhere a missing one is skipped, by name."""
    if importlib.util.find_spec(name) is None:
        message = f"{name} is not installed: `make trackers` runs this"
        pytest.fail(message) if os.environ.get("REQUIRE_TRACKERS") else pytest.skip(message)


def run(folder: Path, name: str, script: str, *args: str, processes: int = 1, warns: str = "") -> str:
    variables, _ = OFFLINE[name]
    env = os.environ | variables | {"HOME": str(folder), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [sys.executable, *many, str(HERE / script), name, *args]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("The tracker '") == (1 if warns else 0), result.stderr  # how our warnings begin
    assert warns in result.stderr
    return result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_what_is_on_disk(name: str, tmp_path: Path) -> None:
    require(name)
    run(tmp_path, name, "train.py", json.dumps(OFFLINE[name][1]))
    found = json.loads(run(tmp_path, name, "read.py").splitlines()[-1])
    assert found["scalars"] == SCALARS
    assert found["config"] == CONFIG
    assert found.get("project", "digits") == "digits"
    assert found.get("ended", True)
    kind = LOGGER_TYPE_TO_CLASS[name]
    assert set(found.get("images", {})) == ({"picture"} if hasattr(kind, "log_images") else set())
    assert set(found.get("tables", {})) == ({"answers"} if hasattr(kind, "log_table") else set())
    for steps in {**found.get("images", {}), **found.get("tables", {})}.values():
        assert set(steps) == {3}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_two_processes_make_one_run(name: str, tmp_path: Path) -> None:
    require(name)
    run(tmp_path, name, "train.py", processes=2)
    found = json.loads(run(tmp_path, name, "read.py").splitlines()[-1])  # which refuses to find two
    assert found["scalars"] == SCALARS


@pytest.mark.parametrize("name", ["mlflow", "swanlab"])
@pytest.mark.parametrize("log", [[], ["log"]])
def test_a_server_that_stops_answering(name: str, log: list[str], tmp_path: Path) -> None:
    require(name)
    output = run(tmp_path, name, "silent.py", "{}", *log, warns=f"The tracker '{name}' did not end within 2 seconds")
    assert "unanswered" in output  # it was the server that was waited for
    assert output.splitlines()[-1] == "ended"


@pytest.mark.parametrize("name", ["aim", "tensorboard"])
def test_a_bad_value_does_not_lose_the_others(name: str, tmp_path: Path) -> None:
    require(name)
    run(tmp_path, name, "train.py", "{}", "bad", warns=f"The tracker '{name}' failed in `log`;")
    found = json.loads(run(tmp_path, name, "read.py").splitlines()[-1])
    assert found["scalars"] == SCALARS


def test_all_of_them() -> None:
    for name in NAMES:
        require(name)
    PartialState(cpu=True)
    assert sorted(str(name) for name in filter_trackers("all", "logs")) == NAMES


def test_every_tracker_has_a_test() -> None:
    assert sorted(LOGGER_TYPE_TO_CLASS) == NAMES
