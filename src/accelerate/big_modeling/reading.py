"""Reading many tensors at once, each straight to where it belongs.

Several threads read pieces of the files. For the CPU they read into the memory of the tensor itself, or cast each piece
as it comes. For a GPU each has two page-locked buffers: while one is copied over, the other is filled. So a model of
any size passes through a few hundred megabytes of the host.

Between two reads a thread holds Python's lock, for which all others wait: so it does as little there as it can.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import torch

from accelerate.big_modeling.sources import Source, bytes_of
from accelerate.big_modeling.store import Reader

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
        self.starts = range(0, source.nbytes, PIECE)
        # On the CPU each piece is cast as it comes, elsewhere the whole when it is there.
        self.casts = device.type == "cpu" and (dtype if into is None else into.dtype) != source.dtype
        self._lock = threading.Lock()
        self._raw: torch.Tensor | None = None
        self._pieces: Sequence[torch.Tensor] = ()
        self._unread = len(self.starts)

    def new_bytes(self) -> int:
        """Returns how much memory the tensor takes as the allocator of a GPU counts, which keeps small ones apart."""
        count = 0 if self.into is not None else math.prod(self.source.shape) * self.dtype.itemsize
        return count + -count % 512 if count > 2**20 else 0

    def piece(self, number: int) -> torch.Tensor:
        """Returns the memory for a piece of the file, as bytes unless it is cast; made when the first of all comes."""
        with self._lock:
            if self._raw is None:
                self._raw = self._memory()
                if self.casts:
                    self._pieces = self._raw.view(-1).split(PIECE // self.source.dtype.itemsize)
                else:
                    self._pieces = bytes_of(self._raw).split(PIECE)
            return self._pieces[number]

    def _memory(self) -> torch.Tensor:
        into = self.into
        if into is not None and into.is_contiguous() and (self.casts or into.dtype == self.source.dtype):
            return into
        return torch.empty(self.source.shape, dtype=self.dtype if self.casts else self.source.dtype, device=self.device)

    def arrived(self) -> None:
        """One more piece is there, or on its way in the stream of the device."""
        with self._lock:
            self._unread -= 1
            if self._unread > 0 or self._raw is None:
                return
            raw, self._raw, self._pieces = self._raw, None, ()
        if self.into is None:
            self.result = raw.to(self.dtype)
        elif raw is not self.into:
            self.into.copy_(raw)


def read_all(reads: Sequence[Read]) -> None:
    """Reads tensors, several pieces at a time. On return all of them are there."""
    with torch.no_grad():
        for read in reads:
            if read.source.nbytes == 0:
                read.piece(0)
                read.arrived()
    count = sum(len(read.starts) for read in reads)
    if count == 0:
        return
    devices = dict.fromkeys(read.device for read in reads)
    ways = [_way_to(device, [read for read in reads if read.device == device]) for device in devices]
    failed = threading.Event()

    def work() -> None:
        with torch.no_grad(), contextlib.closing(_Hands()) as hands:
            try:
                for way in ways:
                    way.work(hands, failed)
            except BaseException:
                failed.set()
                raise

    # More than there are cores: a thread may wait for the disk.
    count = min(max(8, min(16, os.cpu_count() or 1)), count)
    with ThreadPoolExecutor(count) as pool:
        workers = [pool.submit(work) for _ in range(count)]
    for worker in workers:
        worker.result()
    for way in ways:
        way.finish()


class _Hands:
    """What a thread works with: the file it reads from, two buffers on the way to a device, one on that to the CPU."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._buffers: list[_Buffer] = []
        self._turn = 0
        self._plain: torch.Tensor | None = None

    def plain(self) -> torch.Tensor:
        """Returns memory that is not locked: no GPU is woken up for what stays on the CPU."""
        if self._plain is None:
            self._plain = torch.empty(PIECE, dtype=torch.uint8)
        return self._plain

    def buffer(self) -> _Buffer:
        """Returns a buffer that is free."""
        if len(self._buffers) < 2:
            self._buffers.append(_Buffer())
            return self._buffers[-1]
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        buffer.wait()
        return buffer

    def close(self) -> None:
        self.reader.close()


class _Buffer:
    """Memory on the way to a device, locked where the device is a GPU."""

    def __init__(self) -> None:
        pinned = torch.cuda.is_available()
        self.bytes = torch.empty(PIECE, dtype=torch.uint8, pin_memory=pinned)
        self.view = self.bytes.numpy().data
        # Who waits for it sleeps: the cores are needed to read.
        self._free: Any = torch.cuda.Event(blocking=True) if pinned else None

    def send(self, piece: torch.Tensor, count: int) -> None:
        """Begins to copy the first bytes over, in the current stream."""
        content = self.bytes if count == PIECE else self.bytes[:count]
        piece.copy_(content, non_blocking=self._free is not None and piece.is_cuda)
        if self._free is not None:
            self._free.record()

    def wait(self) -> None:
        """Returns as soon as what it held last has been copied."""
        if self._free is not None:
            self._free.synchronize()


class _Way:
    """How tensors get to a device: here to the CPU, straight into their memory."""

    def __init__(self, device: torch.device, reads: Sequence[Read]) -> None:
        self._todo: SimpleQueue[tuple[Read, int, int]] = SimpleQueue()
        for read in reads:
            for number, start in enumerate(read.starts):
                self._todo.put((read, number, start))

    def work(self, hands: _Hands, failed: threading.Event) -> None:
        """Brings one piece after the other, until none is left or one has failed; for several threads at once."""
        with contextlib.suppress(Empty):
            while not failed.is_set():
                read, number, start = self._todo.get_nowait()
                self.bring(read, number, start, hands)
                read.arrived()

    def bring(self, read: Read, number: int, start: int, hands: _Hands) -> None:
        piece, source = read.piece(number), read.source
        if read.casts:
            part = hands.plain()[: min(PIECE, source.nbytes - start)]
            source.read_into(part.numpy().data, start, hands.reader)
            piece.copy_(part.view(source.dtype))
        else:
            source.read_into(piece.numpy().data, start, hands.reader)

    def finish(self) -> None:
        """Called once, when all pieces have been sent: returns when they are there."""


class _DeviceWay(_Way):
    """By way of a buffer."""

    def bring(self, read: Read, number: int, start: int, hands: _Hands) -> None:
        piece, buffer = read.piece(number), hands.buffer()
        count = min(PIECE, read.source.nbytes - start)
        read.source.read_into(buffer.view if count == PIECE else buffer.view[:count], start, hands.reader)
        buffer.send(piece, count)


class _CudaWay(_DeviceWay):
    """By way of a buffer, in the stream of the caller."""

    def __init__(self, device: torch.device, reads: Sequence[Read]) -> None:
        super().__init__(device, reads)
        self._stream = torch.cuda.current_stream(device)
        # Memory for all tensors at once: asking for each by itself takes longer than reading them.
        with torch.cuda.stream(self._stream), contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(sum(read.new_bytes() for read in reads), dtype=torch.uint8, device=device)

    def work(self, hands: _Hands, failed: threading.Event) -> None:
        with torch.cuda.stream(self._stream):
            super().work(hands, failed)

    def finish(self) -> None:
        self._stream.synchronize()


def _way_to(device: torch.device, reads: Sequence[Read]) -> _Way:
    kinds: dict[str, type[_Way]] = {"cpu": _Way, "cuda": _CudaWay}
    return kinds.get(device.type, _DeviceWay)(device, reads)
