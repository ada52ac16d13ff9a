"""Runs of several processes in the file of their project, and what is left of them when they are killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import torch

from accelerate import Accelerator
from accelerate.runs import store
from accelerate.runs.read import Project
from tests.harness import run_world, world_outcomes
from tests.unit.runs.toys import values

LIMIT = 120.0


def prepared(folder: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, log_with="local", project_dir=folder)
    accelerator.init_trackers("two", config={"lr": 0.1})
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": float(step)}, step=step)


def wait_until_written(folder: str) -> None:
    """Until both ranks have step times in the file, and the first one all its values."""
    project = Project(store.place(folder))
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            [run] = project.runs()
            if set(project.step_times(run.number)) == {0, 1} and len(values(project, run, "loss")) == 10:
                return
        except (ValueError, OSError):
            pass
        time.sleep(0.1)
    raise TimeoutError("the ranks have not written what they have")


def killed_midway(folder: str) -> None:
    accelerator, model, optimizer = prepared(folder)
    train(accelerator, model, optimizer, 0, 10)
    wait_until_written(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def to_the_end(folder: str) -> None:
    accelerator, model, optimizer = prepared(folder)
    train(accelerator, model, optimizer, 10, 15)
    accelerator.end_training()


def test_killed_and_started_again(tmp_path: Path) -> None:
    outcomes = world_outcomes(killed_midway, 2, str(tmp_path), timeout=LIMIT + 60)
    assert [outcome.signal for outcome in outcomes] == ["SIGKILL", "SIGKILL"], outcomes
    project = Project(store.place(tmp_path))
    [run] = project.runs()
    assert run.state == "died"
    assert (run.reason or "").startswith("killed or lost since ")
    assert values(project, run, "loss") == [(step, step) for step in range(10)]
    assert [(process.rank, process.state) for process in run.processes] == [(0, "gone"), (1, "gone")]
    assert {summary.rank for summary in run.summaries if summary.kind == "system"} == {0, 1}
    assert run.config == {"lr": 0.1} and run.facts["processes"] == 2

    # The launcher, which is the parent of both, starts them once more.
    run_world(to_the_end, 2, str(tmp_path), env={"TORCHELASTIC_RESTART_COUNT": "1"})
    [run] = project.runs()
    assert run.state == "ended"
    assert [(each.attempt, each.rank, each.state) for each in run.processes] == [
        (0, 0, "gone"),
        (0, 1, "gone"),
        (1, 0, "ended"),
        (1, 1, "ended"),
    ]
    assert values(project, run, "loss") == [(step, step) for step in range(15)]
    times = project.step_times(run.number)
    assert sum(row[2] for row in times[0]) >= 13 and sum(row[2] for row in times[1]) >= 4
    with sqlite3.connect(project.path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def only_the_first_starts_its_trackers(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=True, log_with="local", project_dir=folder)
    if accelerator.is_main_process:
        accelerator.init_trackers("alone")
    accelerator.log({"loss": 1.0})
    names = [tracker.name for tracker in accelerator.trackers]
    accelerator.end_training()
    return names


def test_trackers_on_the_first_process_alone(tmp_path: Path) -> None:
    assert run_world(only_the_first_starts_its_trackers, 2, str(tmp_path)) == [["local"], []]
    [run] = Project(store.place(tmp_path)).runs()
    assert run.state == "ended" and len(run.processes) == 1
