"""A way to a device that is not here, played by the CPU."""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch


class Mark:
    """Behind some of the copies of a lane, which are done only when somebody waits for them."""

    def __init__(self, lane: FakeLane, place: int) -> None:
        self.lane = lane
        self.place = place

    def synchronize(self) -> None:
        self.lane.finish(self.place)


class FakeLane:
    def __init__(self) -> None:
        self.buffers: list[str] = []
        self.entered: list[str] = []
        self.senders: set[str] = set()
        self.outs: list[weakref.ref[torch.Tensor]] = []
        self._sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._done = 0
        self._guard = threading.RLock()
        self._numbers = itertools.count(3)
        self._overtaken = threading.Event()

    def cross(self) -> None:
        """Have the reader that comes first from now on be overtaken by the second one."""
        self._overtaken.clear()
        self._numbers = itertools.count(1)

    def enter(self) -> None:
        self.entered.append(str(threading.get_ident()))

    def buffer(self, size: int) -> torch.Tensor:
        self.buffers.append(str(threading.get_ident()))
        return torch.full((size,), 255, dtype=torch.uint8)

    def send(self, outs: list[torch.Tensor], content: torch.Tensor, mark: Mark) -> None:
        number = next(self._numbers)
        if number == 1:
            assert self._overtaken.wait(60)
        with self._guard:
            self.senders.add(str(threading.get_ident()))
            self.outs += map(weakref.ref, outs)
            pieces = content.split([out.numel() for out in outs])
            self._sent += [(out.view_as(out), piece.view(out.shape)) for out, piece in zip(outs, pieces, strict=True)]
            mark.place = len(self._sent)
        if number == 2:
            self._overtaken.set()

    def mark(self) -> Mark:
        with self._guard:
            return Mark(self, len(self._sent))

    def finish(self, place: int) -> None:
        with self._guard:
            for out, buffer in self._sent[self._done : place]:
                out.copy_(buffer)
            self._done = max(self._done, place)


class FakeWay(FakeLane):
    """A way for batches. work: how much the loop has submitted. followed: what each copy had to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.work = 0
        self.followed: list[int] = []

    def on(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submitted(self) -> int:
        return self.work

    def follow(self, work: int) -> None:
        self.followed.append(work)

    def arrive(self, mark: Mark) -> None:
        mark.synchronize()
