"""Reading many tensors at once, each straight to where it belongs.

Several threads read pieces of the files. For the CPU they read into the memory of the tensor itself, or cast each piece
as it comes. For a GPU each has two page-locked buffers: while one is copied over, the other is filled. So a model of
any size passes through a few hundred megabytes of the host.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from accelerate.big_modeling.sources import Source, bytes_of

# Small enough for little locked memory, big enough for a disk and a bus to be at full speed.
PIECE = 8 * 2**20


class Read:
    """One tensor to be read.

    device, dtype: where, and as what it is wanted; it is cast over there. into: a tensor that gets the values,
    instead of a new one.
    """

    def __init__(
        self, source: Source, device: torch.device, dtype: torch.dtype, into: torch.Tensor | None = None
    ) -> None:
        self.source = source
        self.device = device
        self.dtype = dtype
        self.into = into
        self.result: torch.Tensor | None = into
        self._lock = threading.Lock()
        self._raw: torch.Tensor | None = None
        self._unread = source.nbytes

    def new_bytes(self) -> int:
        """Returns how much memory the tensor takes as the allocator of a GPU counts, which keeps small ones apart."""
        count = 0 if self.into is not None else math.prod(self.source.shape) * self.dtype.itemsize
        return count + -count % 512 if count > 2**20 else 0

    def raw(self) -> torch.Tensor:
        """Returns what the bytes of the file are read into; made when the first of them comes.

        On the CPU it has the dtype that is wanted: each piece is cast as it comes.
        """
        with self._lock:
            if self._raw is not None:
                return self._raw
            into, casts = self.into, self.device.type == "cpu"
            if into is not None and into.is_contiguous() and (casts or into.dtype == self.source.dtype):
                self._raw = into
            else:
                dtype = self.dtype if casts else self.source.dtype
                self._raw = torch.empty(self.source.shape, dtype=dtype, device=self.device)
            return self._raw

    def arrived(self, count: int) -> None:
        """So many bytes more are there, or on their way in the stream of the device."""
        with self._lock:
            self._unread -= count
            if self._unread > 0 or self._raw is None:
                return
            raw, self._raw = self._raw, None
        if self.into is None:
            self.result = raw.to(self.dtype)
        elif raw is not self.into:
            self.into.copy_(raw)


def read_all(reads: Sequence[Read]) -> None:
    """Reads tensors, several pieces at a time. On return all of them are there."""
    pieces = [(read, start) for read in reads for start in range(0, read.source.nbytes, PIECE)]
    with torch.no_grad():
        for read in reads:
            if read.source.nbytes == 0:
                read.raw()
                read.arrived(0)
    if not pieces:
        return
    # More than there are cores: a thread may wait for the disk.
    count = min(max(8, min(16, os.cpu_count() or 1)), len(pieces))
    ways = {device: _Way(device) for device in {read.device for read in reads}}
    for device, way in ways.items():
        way.reserve(sum(read.new_bytes() for read in reads if read.device == device))
    todo = iter(pieces)
    lock = threading.Lock()
    failed = threading.Event()

    def work() -> None:
        buffers = _Buffers()
        with torch.no_grad():
            while not failed.is_set():
                with lock:
                    piece = next(todo, None)
                if piece is None:
                    return
                read, start = piece
                try:
                    ways[read.device].bring(read, start, min(PIECE, read.source.nbytes - start), buffers)
                except BaseException:
                    failed.set()
                    raise

    with ThreadPoolExecutor(count) as pool:
        workers = [pool.submit(work) for _ in range(count)]
    for worker in workers:
        worker.result()
    for way in ways.values():
        way.finish()


class _Buffers:
    """The buffers of a thread: two that are used in turn on the way to a device, and one on the way to the CPU."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, Any]] = []
        self._turn = 0
        self._plain: torch.Tensor | None = None

    def plain(self) -> torch.Tensor:
        """Returns memory that is not locked: no GPU is woken up for what stays on the CPU."""
        if self._plain is None:
            self._plain = torch.empty(PIECE, dtype=torch.uint8)
        return self._plain

    def next(self) -> tuple[torch.Tensor, Any]:
        """Returns a buffer that is free, and the event that says when it is free again."""
        if len(self._buffers) < 2:
            pinned = torch.cuda.is_available()
            buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=pinned)
            self._buffers.append((buffer, torch.cuda.Event() if pinned else None))
            return self._buffers[-1]
        self._turn = 1 - self._turn
        buffer, event = self._buffers[self._turn]
        if event is not None:
            event.synchronize()
        return buffer, event


class _Way:
    """How bytes get to a device: by way of a buffer, in the stream of the caller where there are streams."""

    def __init__(self, device: torch.device) -> None:
        self._in_memory = device.type == "cpu"
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def reserve(self, count: int) -> None:
        """Gets memory for all tensors of a GPU at once; asking for each by itself takes longer than reading them."""
        if self._stream is not None and count:
            with torch.cuda.stream(self._stream), contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(count, dtype=torch.uint8, device=self._stream.device)

    def bring(self, read: Read, start: int, count: int, buffers: _Buffers) -> None:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            raw, dtype = read.raw(), read.source.dtype
            if raw.dtype != dtype:
                part = buffers.plain()[:count]
                read.source.read_into(part.numpy().data, start)
                first = start // dtype.itemsize
                raw.view(-1)[first : first + count // dtype.itemsize].copy_(part.view(dtype))
            elif self._in_memory:
                read.source.read_into(bytes_of(raw)[start : start + count].numpy().data, start)
            else:
                buffer, event = buffers.next()
                part = buffer[:count]
                read.source.read_into(part.numpy().data, start)
                bytes_of(raw)[start : start + count].copy_(part, non_blocking=self._stream is not None)
                if event is not None:
                    event.record()
            read.arrived(count)

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
