"""Adding up how long each phase takes: on the host, or on a device that works behind it."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Seconds = dict[str, float]  # by phase


class HostClock:
    """For devices that work when they are called. `mark(phase)`: the time since the last mark belonged to `phase`.

    Only at the end of a stretch of time is it known whether it was a step. So there is a pile of open stretches: times
    go to the one on top, and those of a stretch are added to the totals when it is closed to be kept.
    """

    def __init__(self) -> None:
        self._kept: Seconds = {}
        self._open: list[Seconds] = [{}]
        self._last = 0.0

    def begin(self) -> None:
        """Forget everything: time counts from now."""
        self._kept = {}
        self._open = [{}]
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self._add(phase, now - self._last)
        self._last = now

    def _add(self, phase: str, seconds: float) -> None:
        top = self._open[-1]
        top[phase] = top.get(phase, 0.0) + seconds

    def open(self) -> None:
        """A stretch of time begins, at the last mark."""
        self._open.append({})

    def close(self, keep: bool) -> None:
        """The topmost stretch of time has ended, at the last mark."""
        seconds = self._open.pop()
        if keep:
            _add_all(self._kept, seconds)

    def merge(self) -> None:
        """The topmost stretch is a part of the one below it."""
        seconds = self._open.pop()
        _add_all(self._open[-1], seconds)

    def totals(self) -> Seconds:
        """What was kept."""
        return self._kept


def _add_all(seconds: Seconds, more: Seconds) -> None:
    for phase, value in more.items():
        seconds[phase] = seconds.get(phase, 0.0) + value


class EventClock(HostClock):
    """For devices that work behind the host: marks are events in the device's queue, read when it has passed them.

    So each phase gets the time that the device spends between two marks, its idling included: waiting for data counts
    only when the device has run out of work.
    """

    _AT_ONCE = 64  # marks to read together: the device has passed them all when it has passed the last of them

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module
        # Phase and event of each mark, and what happened to the stretches of time right after it.
        self._waiting: deque[tuple[str, Any, list[Callable[[], None]]]] = deque()
        self._spare: list[Any] = []
        self._previous: Any = None
        self._stream: Any = None

    def begin(self) -> None:
        super().begin()
        self._stream = self._module.current_stream()  # asked for once: it is the dearer half of recording
        self._spare.extend(event for _, event, _ in self._waiting)
        self._waiting.clear()
        while len(self._spare) < 2 * self._AT_ONCE:  # made now, not in the steps to measure
            self._spare.append(self._module.Event(enable_timing=True))
        self._previous = self._record()

    def mark(self, phase: str) -> None:
        self._waiting.append((phase, self._record(), []))
        if len(self._waiting) % self._AT_ONCE == 0 and self._waiting[self._AT_ONCE - 1][1].query():
            for _ in range(self._AT_ONCE):
                self._fold()

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else self._module.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _fold(self) -> None:
        phase, event, then = self._waiting.popleft()
        self._add(phase, self._previous.elapsed_time(event) / 1000)
        self._spare.append(self._previous)
        self._previous = event
        for change in then:
            change()

    def open(self) -> None:
        self._in_turn(super().open)

    def close(self, keep: bool) -> None:
        self._in_turn(functools.partial(super().close, keep))

    def merge(self) -> None:
        self._in_turn(super().merge)

    def _in_turn(self, change: Callable[[], None]) -> None:
        """Change the pile when the times of all marks so far are known."""
        if self._waiting:
            self._waiting[-1][2].append(change)
        else:
            change()

    def totals(self) -> Seconds:
        self._module.synchronize()
        while self._waiting:
            self._fold()
        return self._kept


def clock_for(device: torch.device) -> HostClock:
    """The clock that tells the truth about a device."""
    module = getattr(torch, device.type, None)
    return EventClock(module) if device.type != "cpu" and hasattr(module, "Event") else HostClock()
