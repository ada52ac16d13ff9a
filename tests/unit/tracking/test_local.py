"""`log_with="local"`: what a training leaves in the file of its project."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import math
import os
import pickle
import sqlite3
import sys
import warnings
import weakref
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.config.preemption import PREEMPTED
from accelerate.runs import store
from accelerate.runs.read import Project, RecordedRun
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    LocalTracker,
    filter_trackers,
    get_available_trackers,
    known_trackers,
    local,
    overheard,
    recorder,
)
from accelerate.utils import LoggerType
from tests.unit.runs.toys import HOSTILE, values
from tests.unit.tracking.toys import ListTracker


def started(folder: Path, **init: Any) -> Accelerator:
    accelerator = Accelerator(cpu=True, log_with="local", project_dir=folder)
    accelerator.init_trackers("project", **init)
    return accelerator


def only_run(folder: Path) -> tuple[Project, RecordedRun]:
    project = Project(store.place(folder))
    [run] = project.runs()
    return project, run


def train(accelerator: Accelerator, steps: int, optimizers: int = 1) -> list[Any]:
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    prepared = [
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(optimizers)  # as a GAN has
    ]
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        for optimizer in prepared:
            optimizer.step()
        model.zero_grad()
    return prepared


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *warning: shown.append(warning[0]))
    before = warnings.showwarning
    config = {"lr": 0.1, "model": {"layers": 2}, "odd": float("nan"), "kind": torch.float32, HOSTILE: HOSTILE}
    accelerator = started(tmp_path, config=config, init_kwargs={"local": {"name": HOSTILE}})
    train(accelerator, 5, optimizers=2)
    tensor = torch.tensor(3.0)
    accelerator.log(
        {"loss": tensor, "array": np.float32(2), "eval": {"acc": 0.5}, "words": "hello", HOSTILE: 1}, step=7
    )
    tensor += 1  # it is the value at the time of the call that counts
    accelerator.log({"loss": math.nan})
    warnings.filterwarnings("always", message="look out")
    warnings.warn("look out", stacklevel=1)
    logging.getLogger("elsewhere").warning("and %s", "there")
    folder = accelerator.save_state(tmp_path / "state")
    accelerator.load_state(folder)
    accelerator.end_training()

    project, run = only_run(tmp_path)
    assert (run.name, run.state, run.reason, run.resumed) == (HOSTILE, "ended", None, None)
    wanted = {"lr": 0.1, "model": {"layers": 2}, "odd": "nan", "kind": "torch.float32", HOSTILE: HOSTILE}
    assert run.config == wanted
    assert run.facts["processes"] == 1 and run.facts["torch"] == torch.__version__
    assert {each.name for each in run.metrics} == {"loss", "array", "eval/acc", HOSTILE}
    assert values(project, run, "loss") == [(7, 3.0), (1, None)]
    assert values(project, run, "array") == [(7, 2.0)] and values(project, run, "eval/acc") == [(7, 0.5)]
    events = [(event.kind, event.text) for event in run.events]
    assert ("text", "words: hello") in events
    assert ("warning", "UserWarning: look out") in events and ("warning", "elsewhere: and there") in events
    assert ("saved", str(folder)) in events and ("loaded", str(folder)) in events
    steps = project.step_times(run.number)[0]
    assert steps[-1][1] == 4 == sum(row[2] for row in steps)  # between 5 steps of the first optimizer
    assert {"process CPU, %", "process memory, GiB", "machine memory, %"} <= {
        each.name for each in run.summaries if each.kind == "system"
    }
    assert list(map(str, shown)) == ["look out"] and warnings.showwarning is before
    assert logging.getLogRecordFactory() is logging.LogRecord


def test_steps_are_heard_whenever_the_optimizer_was_prepared(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="local", project_dir=tmp_path)
    [optimizer] = train(accelerator, 1)
    assert optimizer.after_step == ()  # nobody listens, so nothing is called
    accelerator.init_trackers("project")
    for _ in range(3):
        optimizer.step()
    accelerator.end_training()
    project, run = only_run(tmp_path)
    assert sum(row[2] for row in project.step_times(run.number)[0]) == 2


def test_all_does_not_mean_it(tmp_path: Path) -> None:
    assert LoggerType.LOCAL not in get_available_trackers()
    everything = filter_trackers("all", tmp_path)
    assert LoggerType.LOCAL not in everything
    assert filter_trackers(["all", "local"], tmp_path) == [*everything, LoggerType.LOCAL]
    assert filter_trackers(LoggerType.LOCAL, tmp_path) == [LoggerType.LOCAL]
    assert known_trackers()["local"] is LocalTracker and "local" not in LOGGER_TYPE_TO_CLASS  # as in the release
    with pytest.raises(ValueError, match="'local' writes to a folder, but there is none: pass `project_dir`"):
        Accelerator(cpu=True, log_with="local")


def test_who_logs_elsewhere_pays_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=ListTracker())
    accelerator.init_trackers("project")
    [optimizer] = train(accelerator, 1)
    assert optimizer.after_step == ()
    accelerator.end_training()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_place_of_the_folder_is_said_when_it_starts(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"^The tracker 'local' keeps runs in a folder, and .*file.* is, or"):
        started(tmp_path / "file" / below)


def test_a_name_that_is_no_text_is_refused_before_anything_starts(tmp_path: Path) -> None:
    other = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=[other, "local"], project_dir=tmp_path)
    with pytest.raises(TypeError, match=r"^The name of a run is an int: pass a str, as `project_name`\.$"):
        accelerator.init_trackers(3)  # type: ignore[arg-type]
    assert other.seen == [] and accelerator.trackers == []


@dataclasses.dataclass
class Settings:
    lr: float = 3


class Keyed:
    """Keys and values, but no Mapping."""

    def keys(self) -> list[str]:
        return ["lr"]

    def __getitem__(self, key: str) -> int:
        return 3


@pytest.mark.parametrize(
    "config",
    [{"lr": 3}, MappingProxyType({"lr": 3}), argparse.Namespace(lr=3), SimpleNamespace(lr=3), Settings(), Keyed()],
)
@pytest.mark.parametrize("instance", [False, True])
def test_settings_by_name(config: Any, instance: bool, tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True, log_with=LocalTracker("project", tmp_path) if instance else "local", project_dir=tmp_path
    )
    accelerator.init_trackers("project", config=config)
    accelerator.end_training()
    assert only_run(tmp_path)[1].config == {"lr": 3}


@pytest.mark.parametrize(("config", "kind"), [("lr=3", "a str"), ([1], "a list"), (Settings, "a type")])
def test_settings_without_names_are_refused(config: Any, kind: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"^config is {kind}: pass the settings of the run as a dict, by name"):
        started(tmp_path, config=config)
    assert not store.place(tmp_path).exists()
    own = ListTracker()  # which may take anything
    accelerator = Accelerator(cpu=True, log_with=own)
    accelerator.init_trackers("project", config=config)
    accelerator.end_training()
    assert own.seen[1] == ("config", config)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    store.place(tmp_path).mkdir()
    accelerator = started(tmp_path, config={"a": 1})
    with pytest.warns(
        UserWarning, match=r"'local' failed in `\w+`; training continues, .*runs\.sqlite cannot be"
    ) as caught:
        train(accelerator, 2)
        for number in range(10):
            accelerator.log({"loss": number})
        accelerator.end_training()
    assert len(caught) == 1


def test_a_locked_file_is_waited_for(tmp_path: Path) -> None:
    accelerator = started(tmp_path)
    other = sqlite3.connect(store.place(tmp_path), isolation_level=None, timeout=60)
    other.execute("BEGIN EXCLUSIVE")
    for number in range(100):
        accelerator.log({"loss": number}, step=number)
    other.execute("ROLLBACK")
    other.close()
    accelerator.end_training()
    project, run = only_run(tmp_path)
    assert values(project, run, "loss") == [(number, number) for number in range(100)]


def test_a_file_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    accelerator = started(tmp_path)
    tracker = accelerator.get_tracker("local")
    accelerator.log({"loss": 1.0})
    with tracker.tracker._change:
        assert tracker.tracker._change.wait_for(lambda: None in tracker.tracker._states, timeout=60)
    store.place(tmp_path).unlink()
    accelerator.log({"loss": 2.0})
    accelerator.end_training()
    project, run = only_run(tmp_path)
    assert run.name == "project" and values(project, run, "loss")[-1] == (1, 2.0)


def heard(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_an_error_that_ends_the_program_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[0]))
    monkeypatch.setattr(overheard, "_hears_errors", False)
    accelerator = started(tmp_path)
    accelerator.log({"loss": 1.0})
    heard(ValueError("too bad\nand more"))
    assert shown == [ValueError]
    project, run = only_run(tmp_path)
    assert (run.state, run.reason) == ("died", "ValueError: too bad")
    assert values(project, run, "loss") == [(0, 1.0)]
    accelerator.end_training()  # at the exit
    assert only_run(tmp_path)[1].state == "died"


def test_ctrl_c_and_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[0]))
    monkeypatch.setattr(overheard, "_hears_errors", False)
    accelerator = started(tmp_path)
    with monkeypatch.context() as while_it_is_written:

        def interrupted(*arguments: Any) -> bool:
            raise KeyboardInterrupt

        while_it_is_written.setattr(recorder.Recorder, "end", interrupted)
        heard(KeyboardInterrupt())
    heard(KeyboardInterrupt())
    assert shown == [KeyboardInterrupt] * 2
    assert (only_run(tmp_path)[1].state, only_run(tmp_path)[1].reason) == ("died", "interrupted")
    accelerator.end_training()


def test_an_error_on_its_way_through_the_end_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(overheard, "_hears_errors", False)
    accelerator = started(tmp_path)
    error = KeyError("gone")
    try:
        try:
            raise error
        finally:
            accelerator.end_training()
    except KeyError:
        pass
    assert only_run(tmp_path)[1].state == "ended"  # somebody may still catch it
    heard(RuntimeError("of something else"))
    assert only_run(tmp_path)[1].state == "ended"
    heard(error)
    _, run = only_run(tmp_path)
    assert (run.state, run.reason) == ("died", "KeyError: 'gone'")


class Rare(KeyError):
    """One that can be watched."""


def test_an_error_that_was_caught_is_forgotten(tmp_path: Path) -> None:
    def ends_on_the_way() -> weakref.ref[Rare]:
        accelerator = started(tmp_path)
        error = Rare("caught")
        try:
            try:
                raise error
            finally:
                accelerator.end_training()
        except Rare:
            assert pickle.loads(pickle.dumps(error)).args == ("caught",)  # as it is sent to another process
        return weakref.ref(error)

    gone = ends_on_the_way()
    gc.collect()
    assert gone() is None


def test_what_is_heard_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *warning: shown.append(warning[0]))

    class Unspeakable(UserWarning):
        def __str__(self) -> str:
            raise AttributeError

    class Unreadable:
        def __str__(self) -> str:
            raise AttributeError

    accelerator = started(tmp_path)
    warnings.showwarning(Unspeakable(), Unspeakable, "file", 1)
    assert logging.makeLogRecord({"levelno": logging.ERROR, "msg": "of another process"}).levelno == logging.ERROR
    made = logging.getLogRecordFactory()("name", logging.ERROR, "file", 1, Unreadable(), (), None)
    assert made.levelno == logging.ERROR
    accelerator.end_training()
    assert len(shown) == 1 and only_run(tmp_path)[1].events == []


@pytest.mark.parametrize(("code", "reason"), [(3, "the script ended with 3"), (130, "interrupted")])
def test_a_script_that_leaves_with_a_code(tmp_path: Path, code: int, reason: str) -> None:
    accelerator = started(tmp_path)
    overheard.exits(code)
    accelerator.end_training()
    assert (only_run(tmp_path)[1].state, only_run(tmp_path)[1].reason) == ("died", reason)


def test_a_preempted_run_has_not_died(tmp_path: Path) -> None:
    accelerator = started(tmp_path)
    overheard.exits(PREEMPTED)
    accelerator.end_training()
    assert (only_run(tmp_path)[1].state, only_run(tmp_path)[1].reason) == ("ended", "preempted, and saved")


def test_a_program_that_never_says_that_training_has_ended(tmp_path: Path) -> None:
    accelerator = started(tmp_path)
    accelerator.log({"loss": 1.0})
    accelerator.get_tracker("local").tracker.leave()  # as at the exit
    project, run = only_run(tmp_path)
    assert run.state == "ended" and values(project, run, "loss") == [(0, 1.0)]
    accelerator.end_training()


def test_a_fork_writes_nothing(tmp_path: Path) -> None:
    accelerator = started(tmp_path)
    accelerator.log({"loss": 1.0}, step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            accelerator.log({"loss": 2.0}, step=2)
            accelerator.get_tracker("local").tracker.leave()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    accelerator.end_training()
    project, run = only_run(tmp_path)
    assert values(project, run, "loss") == [(1, 1.0)]


def test_more_than_can_be_written_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "CAPACITY", 5)
    writer = recorder.Recorder(store.place(tmp_path), recorder.Identity("name", key="key"))
    for number in range(8):
        writer.log({"loss": number}, None, None)
    writer.start()
    writer.end("ended")
    writer.close()
    project, run = only_run(tmp_path)
    assert len(values(project, run, "loss")) == 5
    assert [event.text.partition(":")[0] for event in run.events] == ["3 calls of `log` were dropped"]


def recorded(folder: Path, calls: list[tuple[dict[str, Any], Any]], attempt: int = 0, steps: int = 0) -> None:
    """One attempt of a run, in which `log` was called so."""
    writer = recorder.Recorder(store.place(folder), recorder.Identity("name", launch="one", attempt=attempt))
    for values_of_call, step in calls:
        writer.log(values_of_call, step, None)
    for _ in range(steps):
        writer.step()
    # What the tables do not take, whatever it may be.
    writer._pending.append(recorder.Point("metric", "loss", 1, math.nan, 0.0, 1.0))
    writer.start()
    assert writer.end("ended")
    writer.close()
    assert writer.trouble is None
    writer.step()
    writer.step()
    assert writer._durations == []


def test_no_value_keeps_others_from_the_file(tmp_path: Path) -> None:
    recorded(tmp_path, [({"loss": 1.0}, step) for step in (5, math.nan, math.inf, None)])
    project, run = only_run(tmp_path)
    assert [step for step, _ in values(project, run, "loss")] == [5, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "kind"),
    [([0.5, 0.7], "a list"), (torch.ones(3), "a Tensor"), (np.ones(2), "a ndarray"), (object(), "an object")],
)
def test_a_value_that_is_not_kept_is_said_once(tmp_path: Path, value: Any, kind: str) -> None:
    accelerator = started(tmp_path)
    accelerator.log({"loss": 1.0, "nothing": None}, step=0)
    sentence = rf"keeps numbers and texts, and was given 'eval/per class', {kind}, which is left out: log each number"
    with pytest.warns(UserWarning, match=sentence) as told:
        accelerator.log({"eval": {"per class": value}, "loss": 2.0}, step=1)
        accelerator.log({"more": value}, step=2)
        accelerator.end_training()
    assert len(told) == 1
    project, run = only_run(tmp_path)
    assert [number for _, number in values(project, run, "loss")] == [1.0, 2.0]
    assert {each.name for each in run.metrics} == {"loss"}


def test_a_restart_counts_on(tmp_path: Path) -> None:
    recorded(tmp_path, [({"loss": 1.0}, 2**70), ({"loss": 1.0}, None), ({"acc": 1.0}, 6)], steps=4)
    recorded(tmp_path, [({"loss": 2.0}, None), ({"loss": 2.0}, 3), ({"loss": 2.0}, None)], attempt=1, steps=3)
    project, run = only_run(tmp_path)
    assert [step for step, _ in values(project, run, "loss")] == [2**70, 1, 7, 3, 9]
    assert [row[1] for row in project.step_times(run.number)[0]] == [3, 5]


def test_attempts_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("none", ""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        assert str(os.getppid()) in local._launcher() and local._launcher() == local._launcher()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    assert local._launcher() == "job 7"


def test_texts_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_TEXTS", 2)
    recorded(tmp_path, [({"words": str(number)}, None) for number in range(5)])
    events = [event.text for event in only_run(tmp_path)[1].events]
    assert events == ["words: 0", "words: 1", "Only the first 2 logged texts are kept."]


def test_nobody_listens_after_the_end(tmp_path: Path) -> None:
    accelerator = started(tmp_path)
    accelerator.end_training()
    [optimizer] = train(accelerator, 1)
    assert optimizer.after_step == ()


def test_it_is_plain_json(tmp_path: Path) -> None:
    accelerator = started(tmp_path, config={"a": {1, 2}, 3: (1, None, True, 10**30, "\udcff\0")})
    accelerator.log({"half \udcff": 1.0, "huge": 10**400}, step=2**70)
    accelerator.end_training()
    project, run = only_run(tmp_path)
    assert run.config == {"a": "{1, 2}", "3": [1, None, True, 10**30, "?\ufffd"]}
    assert values(project, run, "half ?") == [(2.0**70, 1.0)]
    assert values(project, run, "huge") == [(2.0**70, math.inf)]
    json.dumps(run.config)
