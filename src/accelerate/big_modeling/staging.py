"""Weights that the device cannot read where they are, brought through page-locked buffers.

    file or memory --readers, several at once--> buffers --the bus--> device

Each reader is a thread that does all there is to do for a part of a tensor: it fills a buffer of its own, sends it off,
and takes the next part. It has two buffers: while one of them travels, the other is filled.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from accelerate.big_modeling.store import FileRange, bytes_of, read_fully

# Small enough that all readers have work while two blocks are on their way: one alone is far slower than the bus.
PART = 4 * 1024 * 1024
# A few even where there are fewer cores: a reader may wait for the disk.
READERS = max(4, min(16, os.cpu_count() or 1))
_BUFFERS = 2  # of each reader


class Lane(Protocol):
    """The way from the buffers to the device. What is sent travels one after the other, whoever sent it."""

    def enter(self) -> None:
        """Called once by each thread that will send."""

    def buffer(self, size: int) -> torch.Tensor:
        """Page-locked memory."""

    def send(self, out: torch.Tensor, buffer: torch.Tensor, mark: Any) -> None:
        """Begin to copy bytes, and set the mark behind them."""

    def mark(self) -> Any:
        """A mark behind all that was sent until now; its `synchronize` waits for that."""


class _Memory:
    """A tensor to be read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # kept alive
        self._address = tensor.data_ptr()

    def fill(self, buffer: _Buffer, start: int, size: int) -> None:
        ctypes.memmove(buffer.address, self._address + start, size)  # without Python's lock: several run at once

    def close(self) -> None:
        """There is nothing to close."""


class _File:
    """A part of a file to be read, open until all of it was."""

    def __init__(self, place: FileRange, handle: int) -> None:
        self._place = place
        self._handle = handle

    def fill(self, buffer: _Buffer, start: int, size: int) -> None:
        view = buffer.view if size == len(buffer.view) else buffer.view[:size]
        read_fully(self._handle, view, self._place.offset + start, self._place.path)

    def close(self) -> None:
        os.close(self._handle)


class Job:
    """Some tensors to be brought in together.

    over: set as soon as everything has been sent, or given up. mark: behind the last copy, from then on. error: what
    went wrong. cancelled: set it when the tensors are not needed any more; the job is then over soon.
    """

    def __init__(self) -> None:
        self.over: threading.Event = threading.Event()
        self.mark: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self._sources: list[_Memory | _File] = []
        self._left = 0
        self._guard = threading.Lock()

    def open(self, source: torch.Tensor | FileRange) -> _Memory | _File:
        opened: _Memory | _File
        if isinstance(source, FileRange):
            handle = source.open()
            # A file that has lost its name is still mapped.
            opened = _Memory(source.mapped()) if handle is None else _File(source, handle)
        else:
            opened = _Memory(source)
        self._sources.append(opened)
        return opened

    def expect(self, parts: int) -> None:
        self._left = parts
        if parts == 0:
            self.end()

    def count_down(self) -> bool:
        """One part less; says whether it was the last one."""
        with self._guard:
            self._left -= 1
            return self._left == 0

    def end(self) -> None:
        for source in self._sources:
            source.close()
        self._sources = []
        self.over.set()


class _Part(NamedTuple):
    """As much of a tensor as fits into a buffer."""

    job: Job
    source: _Memory | _File
    start: int
    out: torch.Tensor


class _Buffer:
    def __init__(self, lane: Lane, size: int) -> None:
        self.bytes: torch.Tensor = lane.buffer(size)
        self.view = self.bytes.numpy().data
        self.address: int = self.bytes.data_ptr()
        self.left: Any = lane.mark()  # behind the copy of what it held last


class Stager:
    """Brings tensors in through buffers. Its threads begin with the first job and end with `close`."""

    def __init__(self, lane: Lane, part: int = PART, readers: int = READERS) -> None:
        self._lane = lane
        self._size = part
        self._count = readers
        self._todo: SimpleQueue[_Part | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def bring(self, pairs: list[tuple[torch.Tensor | FileRange, torch.Tensor]]) -> Job:
        """Begin to fill tensors on the device, each from its source."""
        job = Job()
        parts: list[_Part] = []
        try:
            for source, out in pairs:
                if source.nbytes:
                    opened = job.open(source)
                    pieces = bytes_of(out).split(self._size)
                    parts += [_Part(job, opened, self._size * i, piece) for i, piece in enumerate(pieces)]
        except OSError as error:
            job.error = error
            parts = []
        job.expect(len(parts))
        for part in parts:
            self._todo.put(part)
        if parts and not self._threads:
            self._start_threads()
        return job

    def _start_threads(self) -> None:
        for _ in range(self._count):
            thread = threading.Thread(target=self._run, name="offload-reader", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads, after what has been begun."""
        for _ in self._threads:
            self._todo.put(None)
        # A reader may be where the garbage is collected that this belongs to: it cannot wait for itself.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()
        self._threads = []

    @torch.no_grad()
    def _run(self) -> None:
        self._lane.enter()
        buffers: deque[_Buffer] = deque()
        while (part := self._todo.get()) is not None:
            job = part.job
            try:
                if not job.cancelled and job.error is None:
                    self._bring(part, buffers)
            except Exception as error:
                job.error = error
            # A thread that waits for work must not keep memory of the device.
            del part
            if job.count_down():
                self._end(job)
            del job

    def _bring(self, part: _Part, buffers: deque[_Buffer]) -> None:
        if len(buffers) < _BUFFERS:
            buffers.append(_Buffer(self._lane, self._size))
        buffers.rotate()
        buffer = buffers[0]
        buffer.left.synchronize()
        size = part.out.numel()
        part.source.fill(buffer, part.start, size)
        content = buffer.bytes if size == self._size else buffer.bytes[:size]
        self._lane.send(part.out, content, buffer.left)

    def _end(self, job: Job) -> None:
        try:
            # Not that of the last part: another reader may have sent its part after that one and been faster here.
            job.mark = self._lane.mark()
        except Exception as error:
            job.error = error
        job.end()
