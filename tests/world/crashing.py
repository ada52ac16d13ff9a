"""Ranks that are forked from one prepared process, talk over a pipe, and can be killed at any step of a save."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.checkpoint.agreement import Background
from accelerate.comm import Communicator
from accelerate.comm.base import set_current
from accelerate.io import disk
from accelerate.state import AcceleratorState, PartialState

# What a save changes on the disk, one by one. (For who is killed after a flush all is as it was before it.)
STEPS = ("write", "make_folder", "rename", "remove", "remove_tree")
EXCHANGES = ("gather_objects", "broadcast_objects", "barrier")


class Pipe(Communicator):
    """Two processes at the ends of a pipe."""

    size = 2

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank = rank
        self._end = end
        self._end.settimeout(60)

    def gather_objects(self, value: Any) -> list[Any]:
        content = pickle.dumps(value)
        self._end.sendall(struct.pack("<Q", len(content)) + content)
        other = pickle.loads(self._exactly(*struct.unpack("<Q", self._exactly(8))))
        return [value, other] if self.rank == 0 else [other, value]

    def broadcast_objects(self, values: list[Any], source: int = 0) -> None:
        values[:] = Pipe.gather_objects(self, list(values))[source]

    def barrier(self) -> None:
        Pipe.gather_objects(self, None)

    def _exactly(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            part = self._end.recv(size - len(content))
            if not part:
                raise EOFError("the other rank is gone")
            content += part
        return content


def forked(work: Callable[[Callable[[Any], None]], None]) -> tuple[int, int]:
    """Start `work(tell)` in a forked process: its number, and where to read what it has told."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            work(lambda value: (os.write(writing, pickle.dumps(value)), None)[1])
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return pid, reading


def ended(pid: int, reading: int) -> tuple[int, Any]:
    """How a forked process ended (negative for a signal), and what it has told before."""
    with os.fdopen(reading, "rb") as file:
        content = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), pickle.loads(content) if content else None


def two_ranks(
    work: Callable[[int, int, Callable[[Any], None]], None], machines: list[Path] | None = None
) -> list[tuple[int, Any]]:
    """Run `work(rank, the other's process, tell)` on two ranks: how each ended, and what it has told.

    machines: the working folder of each rank, when they are on a machine of their own.
    """
    ends = socket.socketpair()

    def of(rank: int) -> Callable[[Callable[[Any], None]], None]:
        def run(tell: Callable[[Any], None]) -> None:
            ends[1 - rank].close()
            pipe = Pipe(rank, ends[rank])
            state = PartialState()
            local, size = (rank, 2) if machines is None else (0, 1)
            state.process_index, state.num_processes, state.local_process_index = rank, 2, local
            state.world = replace(state.world, rank=rank, size=2, local_rank=local, local_size=size)
            for name in ("process_index", "num_processes", "local_process_index", "world"):
                setattr(AcceleratorState(), name, getattr(state, name))
            set_current(pipe)
            Background._gather = lambda self: pipe.gather_objects  # type: ignore[method-assign]
            if machines is not None:
                os.chdir(machines[rank])
            work(rank, pipe.gather_objects(os.getpid())[1 - rank], tell)

        return run

    ranks = [forked(of(rank)) for rank in (0, 1)]
    for end in ends:
        end.close()
    return [ended(*rank) for rank in ranks]


def kill_at(number: int, others: tuple[int, ...] = ()) -> None:
    """Have this process killed (and others with it) at the `number`-th moment of what it does from now on.

    A moment is just before each step on the disk and each exchange, and in the middle of each write and removal.
    """
    left = number

    def moment(half: Callable[[], Any] | None = None) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if half is not None:
                half()
            for pid in (*others, os.getpid()):
                os.kill(pid, signal.SIGKILL)

    def before(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **kwargs: Any) -> Any:
            moment()
            if name in _HALVES:
                moment(lambda: _HALVES[name](*args))
            return step(*args, **kwargs)

        return stepping

    for name in STEPS:
        setattr(disk, name, before(name, getattr(disk, name)))
    for name in EXCHANGES:
        setattr(Pipe, name, before(name, getattr(Pipe, name)))


def _half_written(descriptor: int, pieces: Any, offset: int) -> None:
    content = b"".join(bytes(piece) for piece in pieces)
    os.pwrite(descriptor, content[: len(content) // 2], offset)


def _half_removed(folder: Path) -> None:
    for path in sorted(folder.iterdir())[::2] if folder.is_dir() else []:
        if path.is_file():
            path.unlink()


_HALVES: dict[str, Callable[..., None]] = {"write": _half_written, "remove_tree": _half_removed}
