"""Adding up how long each phase takes: on the host, or on a device that works behind it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class HostClock:
    """For devices that work when they are called. `mark(phase)`: the time since the last mark belonged to `phase`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = 0.0

    def begin(self) -> None:
        """Forget everything: time counts from now."""
        self._seconds = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def totals(self) -> dict[str, float]:
        """Seconds by phase."""
        return self._seconds


class EventClock(HostClock):
    """For devices that work behind the host: marks are events in the device's queue, read when it has passed them.

    So each phase gets the time that the device spends between two marks, its idling included: waiting for data counts
    only when the device has run out of work.
    """

    _AT_ONCE = 64  # marks to read together: the device has passed them all when it has passed the last of them

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module
        self._waiting: deque[tuple[str, Any]] = deque()
        self._spare: list[Any] = []
        self._previous: Any = None
        self._stream: Any = None

    def begin(self) -> None:
        self._seconds = {}
        self._stream = self._module.current_stream()  # asked for once: it is the dearer half of recording
        self._spare.extend(event for _, event in self._waiting)
        self._waiting.clear()
        while len(self._spare) < 2 * self._AT_ONCE:  # made now, not in the steps to measure
            self._spare.append(self._module.Event(enable_timing=True))
        self._previous = self._record()

    def mark(self, phase: str) -> None:
        self._waiting.append((phase, self._record()))
        if len(self._waiting) % self._AT_ONCE == 0 and self._waiting[self._AT_ONCE - 1][1].query():
            for _ in range(self._AT_ONCE):
                self._fold()

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else self._module.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _fold(self) -> None:
        phase, event = self._waiting.popleft()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + self._previous.elapsed_time(event) / 1000
        self._spare.append(self._previous)
        self._previous = event

    def totals(self) -> dict[str, float]:
        self._module.synchronize()
        while self._waiting:
            self._fold()
        return self._seconds


def clock_for(device: torch.device) -> HostClock:
    """The clock that tells the truth about a device."""
    module = getattr(torch, device.type, None)
    return EventClock(module) if device.type != "cpu" and hasattr(module, "Event") else HostClock()
