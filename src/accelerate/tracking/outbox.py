"""Between training and a tracker: calls are made in order, and neither an error nor a slow call stops training."""

from __future__ import annotations

import atexit
import copy
import functools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from accelerate.comm.tree import leaves
from accelerate.errors import warn
from accelerate.tracking.base import GeneralTracker

# The most that one call waits for its tracker, so that what a script calls on the library itself comes after it.
PATIENCE = 0.05
# What a run may spend on that, and on the same for a script that asks for the tracker: seconds, and a share of the run.
FOR_CALLS = 0.15, 0.01
FOR_ORDER = 5.0, 0.05
# Calls that may wait for a slow tracker; what comes when there are that many is left out.
CAPACITY = 1000
# Seconds that a program which ended with an error waits for its trackers.
AFTER_A_CRASH = 10.0


def time_limit() -> float:
    """How many seconds the end of training waits for trackers (`ACCELERATE_TRACKER_TIMEOUT`, else 300)."""
    text = os.environ.get("ACCELERATE_TRACKER_TIMEOUT", "300")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"ACCELERATE_TRACKER_TIMEOUT is {text!r}: give a number of seconds.") from None


class Allowance:
    """How long a run may be held up for something: some seconds, and a share of the time it has taken so far."""

    def __init__(self, seconds: float, share: float) -> None:
        self._seconds, self._share = seconds, share
        self._began = time.monotonic()
        self._spent = 0.0

    def wait(self, wait: Callable[[float], bool], most: float = math.inf) -> bool:
        """What `wait` returns, called with how long it may take."""
        before = time.monotonic()
        left = self._seconds + self._share * (before - self._began) - self._spent
        done = wait(min(max(left, 0.0), most))
        self._spent += time.monotonic() - before
        return done


class Outbox:
    """Make the calls of one tracker: on a separate thread, or at once for one that is not `in_background`."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self.tracker = tracker
        self.name: str = tracker.name
        self.closed: bool = False
        self._finishing = False  # whether the last call, the tracker's `finish`, is among those that wait
        self._background = tracker.in_background
        self._calls: deque[tuple[str, Callable[[], Any]]] = deque()
        self._change = threading.Condition()
        self._sent = self._done = self._dropped = 0
        self._errors: list[tuple[str, BaseException]] = []
        self._told: set[str] = set()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._for_calls, self._for_order = Allowance(*FOR_CALLS), Allowance(*FOR_ORDER)

    def call(self, what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Have `function(*args, **kwargs)` called after all earlier ones. what: its name in a warning."""
        if self.closed:
            self._tell_once("closed", f"The tracker {self.name!r} has ended: values logged after that are lost.")
            return
        if not self._background:
            self._make(what, functools.partial(function, *args, **kwargs))
            self.tell_errors()
            return
        if self._forked():
            self._tell_once(
                "forked",
                f"The tracker {self.name!r} was started in process {self._process}, and {os.getpid()} was forked "
                "from it: values logged here are lost; log where `init_trackers` was called.",
            )
            return
        with self._change:
            if self._sent - self._done >= CAPACITY:
                self._dropped += 1
            elif (call := self._prepared(what, function, args, kwargs)) is not None:
                self._calls.append((what, call))
                self._sent += 1
                self._change.notify_all()
                self._start_thread()
                self._for_calls.wait(functools.partial(self._wait_for, self._sent), most=PATIENCE)
        if self._dropped:
            self._tell_once(
                "slow",
                f"The tracker {self.name!r} is too slow: {CAPACITY} calls are waiting for it, and values logged "
                "meanwhile are lost; log less often.",
            )
        self.tell_errors()

    def flush(self, limit: float) -> bool:
        """Wait until every call so far has been made; False when that takes longer than `limit` seconds."""
        if self._forked():
            return True  # what waits is the business of the process before the fork
        with self._change:
            done = self._wait_for(self._sent, limit)
        self.tell_errors()
        return done

    def catch_up(self) -> None:
        """Wait until every call so far has been made, as long as a run may be held up by that."""
        if not self._for_order.wait(self.flush):
            self._tell_once(
                "order",
                f"The tracker {self.name!r} is slow: direct calls may reach it before values that were logged earlier.",
            )

    def close(self) -> None:
        """Take no more calls; those that wait are still made, and then the tracker's `finish`."""
        self.closed = True
        if self._forked():
            return
        self._make("finish", self.tracker._release)
        if not self._background:
            self._make("finish", self.tracker.finish)
            return
        with self._change:
            self._calls.append(("finish", self.tracker.finish))
            self._sent += 1
            self._finishing = True
            self._start_thread()
            self._change.notify_all()
        atexit.unregister(self._flush_at_exit)

    def tell_errors(self) -> None:
        """Warn about failed calls: here, on the caller's thread, and once for each kind of call."""
        while self._errors:
            what, error = self._errors.pop(0)
            self._tell_once(
                what,
                f"The tracker {self.name!r} failed in `{what}`; training continues, and later failures are not "
                f"shown: {type(error).__name__}: {error}",
            )

    def _tell_once(self, about: str, message: str) -> None:
        if about not in self._told:
            self._told.add(about)
            warn(message)

    def _wait_for(self, count: int, limit: float) -> bool:
        return self._change.wait_for(lambda: self._done >= count, timeout=max(limit, 0.0))

    def _start_thread(self) -> None:
        if self._thread is None:
            # A daemon: a tracker that hangs must not keep the program from ending.
            self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
            self._thread.start()
            # For scripts that never say that training has ended. Registered this late so that it runs before the
            # library's own: what is registered last is called first.
            atexit.register(self._flush_at_exit)

    def _flush_at_exit(self) -> None:
        if not self._forked():
            # After a crash somebody waits for the machine more than for the last values.
            self.flush(min(time_limit(), AFTER_A_CRASH) if hasattr(sys, "last_value") else time_limit())

    def _forked(self) -> bool:
        """Whether this is a child of the process that the thread runs in. Its locks may be held by nobody."""
        return self._process != os.getpid()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._calls or self._finishing)
                if not self._calls:
                    return
                call = self._calls.popleft()
            # Whatever it raises: on this thread nothing is meant for the program, and the next calls must be made.
            self._make(*call, caught=BaseException)
            with self._change:
                self._done += 1
                self._change.notify_all()

    def _prepared(
        self, what: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """The call, with the arguments as they are now."""
        try:
            own_args, own_kwargs = own_copy(args), own_copy(kwargs)
            wait = end_of_copies((args, kwargs))
        except Exception as error:
            self._errors.append((what, error))
            return None

        def call() -> None:
            wait()
            function(*own_args, **own_kwargs)

        return call

    def _make(self, what: str, call: Callable[[], Any], caught: type[BaseException] = Exception) -> None:
        try:
            call()
        except caught as error:
            self._errors.append((what, error))


def own_copy(value: Any) -> Any:
    """The value as it is now, on the host: the loop may go on to change tensors and arrays.

    Copies from a device are only begun here: nobody waits for what the device is still computing.
    """
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(own_copy(item) for item in value)
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.device.type == "meta":
            return value  # there is nothing to copy; the tracker says what it thinks of it
        return value.clone() if value.device.type == "cpu" else value.to("cpu", non_blocking=_has_events(value.device))
    return copy.copy(value) if type(value).__module__ == "numpy" else value


def _has_events(device: torch.device) -> bool:
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Event")


def end_of_copies(values: Any) -> Callable[[], Any]:
    """What to call to wait for the copies that `own_copy(values)` has begun."""
    for tensor in leaves(values):
        if _has_events(tensor.device):
            event = getattr(torch, tensor.device.type).Event()
            event.record()
            wait: Callable[[], Any] = event.synchronize
            return wait
    return _no_wait


def _no_wait() -> None:
    """Everything is on the host."""
