"""What the device cannot read where it is, brought through page-locked buffers.

    file or memory --readers, several at once--> buffers --the bus--> device

Each reader is a thread that does all there is to do for as much as fits into a buffer, a part of a large tensor or many
small ones: it fills a buffer of its own, sends it off, and takes the next part. It has two buffers: while one of them
travels, the other is filled.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from accelerate.devices.packing import pack_

# Small enough that all readers have work while two blocks are on their way: one alone is far slower than the bus.
PART = 4 * 1024 * 1024
# A few even where there are fewer cores: a reader may wait for the disk.
READERS = max(4, min(16, os.cpu_count() or 1))
_BUFFERS = 2  # of each reader
# From so many tensors of at most this size on, they share buffers.
_MANY = 16
_SMALL = 1 << 16
# Seconds to wait for a thread at the end of the process: one may wait for a device that hangs.
_LEAVING = 2.0


class Lane(Protocol):
    """The way from the buffers to the device. What is sent travels one after the other, whoever sent it."""

    def enter(self) -> None:
        """Called once by each thread that will send."""

    def buffer(self, size: int) -> torch.Tensor:
        """Page-locked memory."""

    def send(self, outs: list[torch.Tensor], content: torch.Tensor, mark: Any) -> None:
        """Begin to copy what belongs one behind the other to these tensors, and set the mark behind it."""

    def mark(self) -> Any:
        """A mark behind all that was sent until now; its `synchronize` waits for that."""


class Source(Protocol):
    """Bytes to be read, by several threads at once."""

    def fill(self, buffer: Buffer, start: int, size: int) -> None:
        """Put the bytes from `start` on into a buffer."""

    def close(self) -> None:
        """All of it was read, or nobody wants it any more."""


class Elsewhere(Protocol):
    """A tensor that is not in memory."""

    @property
    def nbytes(self) -> int: ...

    def opened(self) -> Source:
        """Its bytes; an OSError where they cannot be had."""


class Memory:
    """The bytes of a tensor that lie one behind the other."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # kept alive
        self._address = tensor.data_ptr()

    def fill(self, buffer: Buffer, start: int, size: int) -> None:
        ctypes.memmove(buffer.address, self._address + start, size)  # without Python's lock: several run at once

    def close(self) -> None:
        """There is nothing to close."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor whose elements lie one behind the other, in whatever order, as bytes."""
    # Not `view(-1)`: a single element may keep the stride of the row it was taken from, which no view of bytes has.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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
        self._sources: list[Source] = []
        self._left = 0
        self._guard = threading.Lock()

    def open(self, source: torch.Tensor | Elsewhere) -> Source:
        opened = Memory(source) if isinstance(source, torch.Tensor) else source.opened()
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


class _Piece(NamedTuple):
    """As much of a tensor as fits into a buffer. out: the bytes of the device that it goes to."""

    job: Job
    source: Source
    start: int
    out: torch.Tensor

    def fill(self, buffer: Buffer) -> torch.Tensor:
        self.source.fill(buffer, self.start, len(self.out))
        return buffer.bytes if len(self.out) == len(buffer.bytes) else buffer.bytes[: len(self.out)]

    @property
    def outs(self) -> list[torch.Tensor]:
        return [self.out]


class _Bundle(NamedTuple):
    """As many small tensors of one dtype as fit into a buffer: threads would spend their time on waiting for Python's
    lock if each of them was a piece."""

    job: Job
    sources: list[torch.Tensor]
    outs: list[torch.Tensor]
    size: int

    def fill(self, buffer: Buffer) -> torch.Tensor:
        content = buffer.bytes[: self.size].view(self.sources[0].dtype)
        pack_(content, self.sources)
        return content


def _bundle(job: Job, items: list[tuple[torch.Tensor, torch.Tensor, int]], size: int) -> _Bundle:
    sources, outs, _ = zip(*items, strict=True)
    return _Bundle(job, list(sources), list(outs), size)


class Buffer:
    def __init__(self, lane: Lane, size: int) -> None:
        self.bytes: torch.Tensor = lane.buffer(size)
        self.view: memoryview = self.bytes.numpy().data
        self.address: int = self.bytes.data_ptr()
        self.left: Any = lane.mark()  # behind the copy of what it held last


_Pair = tuple[torch.Tensor | Elsewhere, torch.Tensor]


class Stager:
    """Brings tensors in through buffers. Its threads begin with the first job, and end with `close` or the process."""

    def __init__(self, lane: Lane, part: int = PART, readers: int = READERS, name: str = "offload-reader") -> None:
        self._lane = lane
        self._name = name
        self._size = part
        self._count = readers
        self._todo: SimpleQueue[_Piece | _Bundle | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._leaving = False

    def bring(self, pairs: Sequence[_Pair]) -> Job:
        """Begin to fill tensors on the device, each from its source."""
        job = Job()
        try:
            parts = self._parts(job, pairs)
        except OSError as error:
            job.error = error
            parts = []
        job.expect(len(parts))
        for part in parts:
            self._todo.put(part)
        if parts and not self._threads:
            self._start_threads()
        return job

    def _parts(self, job: Job, pairs: Sequence[_Pair]) -> list[_Piece | _Bundle]:
        parts: list[_Piece | _Bundle] = []
        small: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        most = min(_SMALL, self._size)
        for source, out in pairs:
            size = source.nbytes
            if size <= most and isinstance(source, torch.Tensor):
                small.append((source, out, size))
            else:
                parts += self._pieces(job, source, out)
        if len(small) >= _MANY:
            return parts + self._bundles(job, small)
        for source, out, _ in small:
            parts += self._pieces(job, source, out)
        return parts

    def _pieces(self, job: Job, source: torch.Tensor | Elsewhere, out: torch.Tensor) -> list[_Piece]:
        if not source.nbytes:
            return []
        opened = job.open(source)
        return [_Piece(job, opened, self._size * i, piece) for i, piece in enumerate(bytes_of(out).split(self._size))]

    def _bundles(self, job: Job, small: list[tuple[torch.Tensor, torch.Tensor, int]]) -> list[_Bundle]:
        bundles: list[_Bundle] = []
        by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
        for item in small:
            by_dtype.setdefault(item[0].dtype, []).append(item)
        for items in by_dtype.values():
            begin = filled = 0
            for end, (_, _, size) in enumerate(items):
                if filled + size > self._size:
                    bundles.append(_bundle(job, items[begin:end], filled))
                    begin, filled = end, 0
                filled += size
            bundles.append(_bundle(job, items[begin:], filled))
        return bundles

    def _start_threads(self) -> None:
        for _ in range(self._count):
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        # A thread that is inside of torch when Python ends takes the process down with it.
        atexit.register(self._leave)

    def _leave(self) -> None:
        """End the threads after the parts that they are at. Who still waits for a part is told that it did not come."""
        self._leaving = True
        self.close(seconds=_LEAVING)
        self._leaving = False

    def close(self, seconds: float | None = None) -> None:
        """End the threads, after what has been begun. seconds: how long to wait for each of them."""
        atexit.unregister(self._leave)
        for _ in self._threads:
            self._todo.put(None)
        # A reader may be where the garbage is collected that this belongs to: it cannot wait for itself.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join(seconds)
        self._threads = []

    @torch.no_grad()
    def _run(self) -> None:
        self._lane.enter()
        buffers: deque[Buffer] = deque()
        while (part := self._todo.get()) is not None:
            job = part.job
            try:
                if self._leaving:
                    job.error = RuntimeError("The process ends, and copies nothing any more.")
                if not job.cancelled and job.error is None:
                    self._bring(part, buffers)
            except Exception as error:
                job.error = error
            # A thread that waits for work must not keep memory of the device.
            del part
            if job.count_down():
                self._end(job)
            del job

    def _bring(self, part: _Piece | _Bundle, buffers: deque[Buffer]) -> None:
        if len(buffers) < _BUFFERS:
            buffers.append(Buffer(self._lane, self._size))
        buffers.rotate()
        buffer = buffers[0]
        buffer.left.synchronize()
        self._lane.send(part.outs, part.fill(buffer), buffer.left)

    def _end(self, job: Job) -> None:
        try:
            # Not that of the last part: another reader may have sent its part after that one and been faster here.
            job.mark = self._lane.mark()
        except Exception as error:
            job.error = error
        job.end()
