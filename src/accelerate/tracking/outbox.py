"""Between training and a tracker: calls are made in order, and neither an error nor a slow call stops training."""

from __future__ import annotations

import atexit
import copy
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

# How long a call may hold up the caller, and how many late calls it takes until the tracker is no longer waited for:
# a tracker costs training 3 times 50 ms at most.
PATIENCE = 0.05
LATE_CALLS = 3
# Calls that may wait for a slow tracker; what comes when there are that many is left out.
CAPACITY = 1000


def time_limit() -> float:
    """How many seconds the end of training waits for trackers (`ACCELERATE_TRACKER_TIMEOUT`, else 300)."""
    text = os.environ.get("ACCELERATE_TRACKER_TIMEOUT", "300")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"ACCELERATE_TRACKER_TIMEOUT is {text!r}: give a number of seconds.") from None


class Outbox:
    """Makes the calls of one tracker: on a thread of their own, or with `background=False` at once."""

    def __init__(self, name: str, background: bool = True) -> None:
        self.name = name
        self.closed = False
        self._background = background
        self._calls: deque[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = deque()
        self._change = threading.Condition()
        self._sent = self._done = self._late = self._dropped = 0
        self._errors: list[tuple[str, Exception]] = []
        self._told: set[str] = set()
        self._thread: threading.Thread | None = None

    def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have `function(*args, **kwargs)` called after all earlier ones. what: its name in a warning."""
        if self.closed:
            self._tell_once("closed", f"The tracker {self.name!r} has ended: what is logged after that is left out.")
            return
        if not self._background:
            self._make(what, function, args, kwargs)
            self.tell_errors()
            return
        with self._change:
            if self._sent - self._done >= CAPACITY:
                self._dropped += 1
            else:
                self._calls.append((what, function, own_copy(args), own_copy(kwargs)))
                self._sent += 1
                self._change.notify_all()
                self._start_thread()
                if self._late < LATE_CALLS and not self._wait_for(self._sent, PATIENCE):
                    self._late += 1
        if self._dropped:
            self._tell_once(
                "slow",
                f"The tracker {self.name!r} is too slow: {CAPACITY} calls wait for it, and what is logged meanwhile is "
                "left out; log less often.",
            )
        self.tell_errors()

    def flush(self, limit: float) -> bool:
        """Wait until every call so far has been made; False when that takes longer than `limit` seconds."""
        with self._change:
            done = self._wait_for(self._sent, limit)
        self.tell_errors()
        return done

    def close(self) -> None:
        """Take no more calls; those that wait are still made."""
        with self._change:
            self.closed = True
            self._change.notify_all()

    def tell_errors(self) -> None:
        """Warn about failed calls: here, on the caller's thread, and once for each kind of call."""
        while self._errors:
            what, error = self._errors.pop(0)
            self._tell_once(
                what,
                f"The tracker {self.name!r} failed in `{what}` and training goes on without it: "
                f"{type(error).__name__}: {error}",
            )

    def _tell_once(self, about: str, message: str) -> None:
        if about not in self._told:
            self._told.add(about)
            warnings.warn(message, stacklevel=4)

    def _wait_for(self, count: int, limit: float) -> bool:
        return self._change.wait_for(lambda: self._done >= count, timeout=max(limit, 0.0))

    def _start_thread(self) -> None:
        if self._thread is None:
            # A daemon: a tracker that hangs must not keep the program from ending.
            self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
            self._thread.start()
            _open.add(self)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._calls or self.closed)
                if not self._calls:
                    return
                call = self._calls.popleft()
            self._make(*call)
            with self._change:
                self._done += 1
                self._change.notify_all()

    def _make(self, what: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            self._errors.append((what, error))


_open: weakref.WeakSet[Outbox] = weakref.WeakSet()


@atexit.register
def _flush_at_exit() -> None:
    """For scripts that never say that training has ended."""
    end = time.monotonic() + time_limit()
    for outbox in list(_open):
        outbox.flush(end - time.monotonic())


def own_copy(value: Any) -> Any:
    """The value as it is now: tensors and arrays that the loop goes on to change are copied, on their device."""
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(own_copy(item) for item in value)
    if hasattr(value, "detach") and hasattr(value, "clone"):
        return value.detach().clone()
    return copy.copy(value) if type(value).__module__ == "numpy" else value
