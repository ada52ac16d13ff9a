"""The time before there is a process group: ranks that wait there look who has not come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.config.preemption import NOTE
from accelerate.diagnosis import limits
from accelerate.diagnosis.roll import SILENT, Note, Notes
from accelerate.diagnosis.watch import PATIENCE, HangWatch
from accelerate.environments import World
from accelerate.torch_internals.process_groups import connection_to


@contextmanager
def watched(world: World, attempt: str) -> Iterator[None]:
    """Around what makes the process group. Nobody is ended: a rank may take its time to come, and torch has a limit."""
    limit = limits.limit_from(os.environ)
    if limit == 0 or world.size == 1:
        yield
        return
    watch = HangWatch(_Arrivals(world, attempt), world.rank, limit, abort=False, device_works=lambda: False)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class _Arrivals(Notes):
    """The notes of ranks that have come. They are in the store where all meet, once there is one."""

    headline = "Not all ranks have come"

    def __init__(self, world: World, attempt: str) -> None:
        super().__init__(_Store(world), f"{attempt}-start", world.size)
        self._world = world
        self._own = SILENT

    def write(self, rank: int, note: Note) -> None:
        if note.kind != "left":  # those that have met have no use for it
            self._own = note
            super().write(rank, note)

    def take_turn(self, pause: float) -> bool:
        try:
            return super().take_turn(pause)
        except OSError:  # the store comes with rank 0, where the launcher has none; one of the others says so
            return self._world.rank == 1

    def read(self) -> list[Note]:
        try:
            notes = super().read()
        except OSError:
            others = [_absent(0), *[SILENT] * (self.size - 1)]
            return [self._own if rank == self._world.rank else note for rank, note in enumerate(others)]
        return [_absent(rank) if note == SILENT else note for rank, note in enumerate(notes)]


def _absent(rank: int) -> Note:
    """What is known of a rank that has not come: its launcher knows of an end without an error (see launch/worker.py).

    Other ends are those of all.
    """
    _, _, beside = os.environ.get(NOTE, "").partition(":")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ended = bool(beside) and Path(beside).with_name(f"ended-{attempt}-{rank}").exists()
    return Note("absent", text="ended with code 0" if ended else "")


class _Store:
    """A connection to the store of a world, taken when it is first used."""

    def __init__(self, world: World) -> None:
        self.host, self.port = world.address, world.port
        self._connection: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._connection is None:
            self._connection = connection_to(self.host, self.port, PATIENCE)
        return getattr(self._connection, name)
