"""What is known of runs: their states, their curves in a few numbers, and how their configs differ."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accelerate.runs import store
from accelerate.runs.page import Page, one_file
from accelerate.runs.read import Project, RecordedRun, differences, direction, flat
from tests.unit.runs.toys import runs_of, write


def test_a_run_in_a_few_numbers(tmp_path: Path) -> None:
    logs = [{"loss": 3.0, "acc": 0.1}, {"loss": 1.0, "acc": 0.9}, {"loss": math.nan, "acc": 0.8}, {"loss": math.inf}]
    path = write(tmp_path, "first", logs, {"lr": 0.1, "model": {"layers": 2}})
    project = Project(path)
    for _ in range(2):  # the second time from what is known already
        [run] = project.runs()
        loss, accuracy = run.metrics
        assert (run.name, run.state, run.reason) == ("first", "ended", None)
        assert (loss.count, loss.last, loss.least, loss.most) == (4, math.inf, (1.0, 1.0), (math.inf, 3.0))
        assert (loss.best, accuracy.best) == ((1.0, 1.0), (0.9, 1.0))
        assert (accuracy.count, accuracy.last, accuracy.last_step) == (3, 0.8, 2.0)
    assert flat(run.config) == {"lr": "0.1", "model.layers": "2"}


def test_a_summary_grows_with_its_curve(tmp_path: Path) -> None:
    path = write(tmp_path, logs=[{"loss": 2.0}, {"loss": 5.0}])
    project = Project(path)
    project.runs()
    with store.writing(path) as connection:
        connection.execute("INSERT INTO points SELECT series, number + 10, 7, time, 1 FROM points WHERE value = 5")
        connection.execute("INSERT INTO points SELECT series, number + 20, 8, time, NULL FROM points WHERE value = 5")
    [run] = project.runs()
    [loss] = run.metrics
    assert (loss.count, loss.last, loss.last_step, loss.least, loss.most) == (4, None, 8, (1, 7), (5, 1))


@pytest.mark.parametrize(
    ("name", "better"),
    [
        *(("train/loss", -1), ("loss", -1), ("eval_error", -1)),
        *(("val_acc", 1), ("eval/accuracy", 1), ("F1", 1)),
        *(("lr", 0), ("grad_norm", 0), ("glossary", 0)),
    ],
)
def test_which_end_is_the_better_one(name: str, better: int) -> None:
    assert direction(name) == better


def processes(path: Path, *rows: tuple[Any, ...]) -> RecordedRun:
    """The run with these processes: attempt, rank, space, pid, born, seen, state, reason."""
    with store.writing(path) as connection:
        connection.execute("DELETE FROM processes")
        for attempt, rank, space, pid, born, seen, state, reason in rows:
            connection.execute(
                "INSERT INTO processes VALUES (1, ?, ?, 'host', ?, ?, ?, ?, ?, 10, ?, ?)",
                (attempt, rank, space, pid, born, seen - 60, seen, state, reason),
            )
    return runs_of(path)[0]


def test_states(tmp_path: Path) -> None:
    path = write(tmp_path)
    here, pid, now = store.process_space(), os.getpid(), time.time()
    born = store.born(pid)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    me, gone = (here, pid, born, now), (here, ended.pid, now, now)
    assert processes(path, (0, 0, *me, None, None)).state == "running"
    lost = processes(path, (0, 0, *gone, None, None))
    assert lost.state == "died"
    assert lost.reason == time.strftime("killed or lost since %Y-%m-%d %H:%M:%S", time.localtime(now))
    # The number of a process that is gone may be given to another one.
    assert processes(path, (0, 0, here, pid, (born or 0) - 100, now, None, None)).state == "died"
    # Of other machines it is known when they were last heard of.
    assert processes(path, (0, 0, "elsewhere", 1, now, now, None, None)).state == "running"
    assert processes(path, (0, 0, "elsewhere", 1, now, now - 100, None, None)).state == "died"
    assert processes(path, (0, 0, *me, "ended", None), (0, 1, *gone, None, None)).state == "ended"
    some = processes(path, (0, 0, *me, None, None), (0, 1, *gone, None, None))
    assert some.state == "running" and (some.reason or "").startswith("rank 1 killed or lost since ")
    first = processes(
        path, (0, 0, here, pid, born, now, "died", "lost the other"), (0, 1, *me[:3], now - 1, "died", "ValueError: x")
    )
    assert (first.state, first.reason) == ("died", "rank 1: ValueError: x")
    again = processes(path, (0, 0, *gone, "died", "x"), (1, 0, *me, None, None))
    assert (again.state, again.reason) == ("running", None)


def test_a_run_that_goes_on_from_anothers_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "a", events=[("saved", "/c/1")])
    write(tmp_path, "b", events=[("loaded", "/c/1"), ("saved", "/c/1")])
    path = write(tmp_path, "c", events=[("loaded", "/c/1")])
    write(tmp_path, "d", events=[("loaded", "/c/9")])
    assert [run.resumed for run in runs_of(path)] == [None, 1, 2, None]


@pytest.mark.parametrize("config", ["'lr=3'", "[1, 2]", "null"])
def test_a_config_that_is_no_mapping_keeps_nothing_from_being_read(config: str, tmp_path: Path) -> None:
    write(tmp_path, "fine", config={"lr": 1})
    path = write(tmp_path, "strange", config={"lr": 2})
    with store.writing(path) as connection:
        connection.execute("UPDATE runs SET config = ? WHERE name = 'strange'", (config.replace("'", '"'),))
    runs = runs_of(path)
    assert [run.config for run in runs] == [{"lr": 1}, {"config": json.loads(config.replace("'", '"'))}]
    assert differences(runs)[0]["lr"] == ["1", None]
    one_file(Page(Project(path), [1, 2]))


def test_differences_of_configs(tmp_path: Path) -> None:
    write(tmp_path, "a", config={"lr": 0.1, "seed": 1, "same": [1]})
    path = write(tmp_path, "b", config={"lr": 0.2, "same": [1], "deep": {"x": None}})
    different, common = differences(runs_of(path))
    assert different == {"lr": ["0.1", "0.2"], "seed": ["1", None], "deep.x": [None, "null"]}
    assert common == {"same": "[1]"}


def test_step_times(tmp_path: Path) -> None:
    path = write(tmp_path, steps=5)
    [row] = Project(path).step_times(1)[0]
    _, step, count, median, longest = row
    assert (step, count) == (4, 4) and 0 <= median <= longest
