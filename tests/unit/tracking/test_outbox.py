"""Neither an error in a tracker nor a slow one stops training."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from accelerate.state import PartialState
from accelerate.tracking import outbox as module
from accelerate.tracking.outbox import Allowance, Outbox, own_copy, time_limit
from tests.unit.tracking.toys import ListTracker


@pytest.fixture(autouse=True)
def state() -> None:
    PartialState(cpu=True)


@pytest.fixture
def tracker() -> ListTracker:
    return ListTracker()


@pytest.fixture
def outbox(tracker: ListTracker) -> Iterator[Outbox]:
    outbox = Outbox(tracker)
    yield outbox
    if not outbox.closed:
        outbox.close()
    assert outbox.flush(10)


def test_in_order_and_done_when_it_returns(outbox: Outbox, tracker: ListTracker) -> None:
    for step in range(50):
        outbox.call("log", tracker.log, {"a": step}, step=step)
    assert outbox.flush(10)
    assert [entry[2] for entry in tracker.seen] == list(range(50))


def test_on_a_thread_of_its_own(outbox: Outbox) -> None:
    threads: list[threading.Thread] = []
    for _ in range(2):
        outbox.call("log", lambda: threads.append(threading.current_thread()))
    assert outbox.flush(10)
    assert threads[0] is threads[1] is not threading.current_thread()
    assert threads[0].daemon


def fail(*args: Any, **kwargs: Any) -> None:
    raise OSError("no network")


def test_an_error_is_said_once(outbox: Outbox, tracker: ListTracker, recwarn: pytest.WarningsRecorder) -> None:
    for _ in range(3):
        outbox.call("log", fail)
        outbox.flush(10)
    outbox.call("log", tracker.log, {"a": 1})
    outbox.call("log_images", fail)
    assert outbox.flush(10)
    assert len(tracker.seen) == 1
    texts = [str(warning.message) for warning in recwarn]
    assert texts == [
        "The tracker 'list' failed in `log`; training continues, and later failures are not shown: OSError: no network",
        "The tracker 'list' failed in `log_images`; training continues, and later failures are not shown: OSError: "
        "no network",
    ]
    assert recwarn[0].filename == __file__


def test_a_slow_tracker_is_not_waited_for(outbox: Outbox, tracker: ListTracker) -> None:
    gate = threading.Event()
    outbox.call("log", gate.wait)
    for step in range(20):
        outbox.call("log", tracker.log, {}, step=step)
    assert tracker.seen == []  # and yet we are here
    assert not outbox.flush(0.01)
    gate.set()
    assert outbox.flush(10)
    assert [entry[2] for entry in tracker.seen] == list(range(20))


class Clock:
    """Stands in for the module `time`: moves when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("takes", "first"), [(9.0, 3), (0.02, 7)])
def test_it_costs_a_small_share_of_a_run(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, takes: float, first: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "CAPACITY", 10_000)  # the thread may get no turn meanwhile
    outbox._for_calls = Allowance(*module.FOR_CALLS)
    waited: list[float] = []

    def wait_for(count: int, limit: float) -> bool:
        waited.append(min(takes, limit))
        clock.now += waited[-1]
        return takes <= limit

    monkeypatch.setattr(outbox, "_wait_for", wait_for)
    for _ in range(first):
        outbox.call("log", int)
    assert waited == pytest.approx([min(takes, module.PATIENCE)] * first)
    for _ in range(1000):
        clock.now += 0.02  # a step
        outbox.call("log", int)
    assert sum(waited) == pytest.approx(0.15 + 0.01 * clock.now, abs=0.001)
    monkeypatch.undo()


def test_what_is_too_much_is_left_out(
    outbox: Outbox, tracker: ListTracker, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(module, "CAPACITY", 3)
    gate = threading.Event()
    outbox.call("log", gate.wait)
    for step in range(6):
        outbox.call("log", tracker.log, {}, step=step)
    gate.set()
    assert outbox.flush(10)
    assert [entry[2] for entry in tracker.seen] == [0, 1]
    assert ["'list' is too slow" in str(warning.message) for warning in recwarn] == [True]
    outbox.call("log", tracker.log, {}, step=7)
    assert outbox.flush(10)
    assert tracker.seen[-1][2] == 7
    outbox.close()
    assert outbox.flush(10)
    assert tracker.seen[-1] == ("finish",)  # which is never too much


def test_values_are_those_of_the_call(outbox: Outbox, tracker: ListTracker) -> None:
    gate = threading.Event()
    outbox.call("log", gate.wait)
    total, array, more = torch.zeros(()), np.zeros(2), {"x": [torch.ones(1)]}
    outbox.call("log", tracker.log, {"total": total, "array": array, "more": more})
    total += 1
    array += 1
    more["x"][0] += 1
    gate.set()
    assert outbox.flush(10)
    values = tracker.seen[0][1]
    assert float(values["total"]) == 0
    assert values["array"].tolist() == [0, 0]
    assert values["more"]["x"][0].tolist() == [1]


def test_other_objects_are_passed_on() -> None:
    thing = object()
    parameter = torch.nn.Parameter(torch.ones(1))
    assert own_copy(thing) is thing
    assert own_copy((thing, "text")) == (thing, "text")
    assert not own_copy(parameter).requires_grad


def test_after_the_end(outbox: Outbox, tracker: ListTracker, recwarn: pytest.WarningsRecorder) -> None:
    outbox.call("log", tracker.log, {})
    outbox.close()
    assert outbox.flush(10)
    for _ in range(2):
        outbox.call("log", tracker.log, {})
    assert [entry[0] for entry in tracker.seen] == ["log", "finish"]
    assert ["'list' has ended" in str(warning.message) for warning in recwarn] == [True]


class Direct(ListTracker):
    in_background = False


class Bound(ListTracker):
    """Has to do with the thread that trains, as some libraries have."""

    def _release(self) -> None:
        self.seen.append(("release", threading.current_thread()))


def test_on_the_thread_that_trains() -> None:
    tracker = Direct()
    outbox = Outbox(tracker)
    outbox.call("log", lambda: tracker.seen.append((threading.current_thread(),)))
    assert tracker.seen == [(threading.current_thread(),)]
    with pytest.warns(UserWarning, match="failed in `log`"):
        outbox.call("log", fail)
    outbox.close()
    assert outbox.flush(0)
    assert tracker.seen[-1] == ("finish",)


def test_the_thread_that_trains_is_released_at_once() -> None:
    tracker = Bound()
    outbox = Outbox(tracker)
    gate = threading.Event()
    outbox.call("log", gate.wait)
    outbox.close()
    assert tracker.seen == [("release", threading.current_thread())]
    gate.set()
    assert outbox.flush(10)
    assert tracker.seen[-1] == ("finish",)


def test_any_name_may_be_an_argument(outbox: Outbox, tracker: ListTracker) -> None:
    names = ("self", "what", "function", "args", "kwargs")
    outbox.call("log", lambda **kwargs: tracker.seen.append((kwargs,)), **dict.fromkeys(names, 1))
    assert outbox.flush(10)
    assert tracker.seen == [(dict.fromkeys(names, 1),)]


class Uncopyable(dict):
    def items(self) -> Any:
        raise RuntimeError("no copy of this")


def test_what_cannot_be_copied_is_said_once(outbox: Outbox, tracker: ListTracker) -> None:
    with pytest.warns(UserWarning, match="failed in `log`.*RuntimeError: no copy of this") as caught:
        for _ in range(2):
            outbox.call("log", tracker.log, Uncopyable(a=1))
    outbox.call("log", tracker.log, {"a": 2})
    assert outbox.flush(10)
    assert len(caught) == 1
    assert [entry[1] for entry in tracker.seen] == [{"a": 2}]


def test_asking_for_a_slow_tracker_costs_a_run_little(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    gate = threading.Event()
    outbox.call("log", gate.wait)
    waits: list[float] = []
    wait_for = outbox._wait_for
    monkeypatch.setattr(outbox, "_wait_for", lambda count, limit: waits.append(limit) or wait_for(count, limit))
    outbox._for_order = Allowance(0.1, 0.0)
    for _ in range(5):
        outbox.catch_up()
    assert waits == pytest.approx([0.1, 0.0, 0.0, 0.0, 0.0])
    assert [str(warning.message) for warning in recwarn] == [
        "The tracker 'list' is slow: direct calls may reach it before values that were logged earlier."
    ]
    gate.set()


def in_a_fork(outbox: Outbox, tracker: ListTracker) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            outbox.call("log", tracker.log, {"a": 1})
        assert outbox.flush(0)
        outbox.close()
        assert outbox.flush(0)
    return [str(warning.message) for warning in caught]


def test_a_forked_process_says_that_it_cannot_log(outbox: Outbox, tracker: ListTracker) -> None:
    outbox.call("log", tracker.log, {"a": 0})
    ours, theirs = multiprocessing.Pipe(duplex=False)
    outbox._change.acquire()  # as the tracker's thread may, at the moment of the fork
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(in_a_fork(outbox, tracker)))
    process.start()
    outbox._change.release()
    assert ours.poll(30)
    [message] = ours.recv()
    process.join()
    assert f"was started in process {os.getpid()}, and {process.pid} was forked from it" in message
    assert outbox.flush(10)
    assert len(tracker.seen) == 1


def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_limit() == 300
    monkeypatch.setenv("ACCELERATE_TRACKER_TIMEOUT", "1.5")
    assert time_limit() == 1.5
    monkeypatch.setenv("ACCELERATE_TRACKER_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="ACCELERATE_TRACKER_TIMEOUT is 'soon': give a number"):
        time_limit()


FORGETS_TO_END = """
import time
from accelerate import Accelerator
from tests.unit.tracking.toys import ListTracker

class Slow(ListTracker):
    def log(self, values, step=None):
        time.sleep(0.1)
        print("logged", step, flush=True)

accelerator = Accelerator(cpu=True, log_with=Slow())
accelerator.init_trackers("x")
for step in range(5):
    accelerator.log({"a": 1}, step=step)
"""


def test_a_script_that_never_ends_the_training() -> None:
    result = subprocess.run([sys.executable, "-c", FORGETS_TO_END], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"logged {step}" for step in range(5)]


def test_a_tracker_that_wants_to_exit_is_an_error_like_any(outbox: Outbox, tracker: ListTracker) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.warns(
        UserWarning, match="failed in `log`; training continues, and later failures are not shown: SystemExit: 3"
    ):
        outbox.call("log", leave)
        assert outbox.flush(10)
    outbox.call("log", tracker.log, {"a": 1}, step=1)
    assert outbox.flush(10)
    assert len(tracker.seen) == 1


def test_a_call_that_ends_while_the_tracker_is_being_closed(
    tracker: ListTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(tracker)
    gate, idle = threading.Event(), threading.Event()
    outbox._for_calls = Allowance(0.0, 0.0)
    wait_for = outbox._change.wait_for

    def noted(predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        if threading.current_thread() is outbox._thread and not outbox._calls:
            idle.set()
        return wait_for(predicate, timeout)

    monkeypatch.setattr(outbox._change, "wait_for", noted)
    outbox.call("log", gate.wait)

    def release() -> None:
        gate.set()
        assert outbox.flush(10)
        assert idle.wait(60), "the thread has nothing left to do at this moment, and waits"

    monkeypatch.setattr(tracker, "_release", release)
    outbox.close()
    assert outbox.flush(10)
    assert tracker.seen == [("finish",)]
