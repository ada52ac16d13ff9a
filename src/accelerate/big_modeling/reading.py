"""Reading many tensors at once, each straight to where it belongs.

Several threads read pieces of the files. For the CPU they read into the memory of the tensor itself, or cast each piece
as it comes. For a GPU each has two page-locked buffers: while one is copied over, the other is filled. So a model of
any size passes through a few hundred megabytes of the host.

Between two reads a thread holds Python's lock, for which all others wait: so it does as little there as it can.

All of it happens in inference mode, where tensors of every kind can be written to. New ones are made outside of it, so
that a model is the same wherever it was loaded.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from accelerate.big_modeling.sources import Source
from accelerate.big_modeling.store import Reader
from accelerate.devices.staging import bytes_of

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
        # On the CPU each piece is cast as it comes, elsewhere the whole when it is there.
        self.casts: bool = device.type == "cpu" and (dtype if into is None else into.dtype) != source.dtype
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()
        self._left = list(range(len(range(0, source.nbytes, PIECE))))

    def new_bytes(self) -> int:
        """Returns how much memory the tensor takes as the allocator of a GPU counts, which keeps small ones apart."""
        count = 0 if self.into is not None else math.prod(self.source.shape) * self.dtype.itemsize
        return count + -count % 512 if count > 2**20 else 0

    def pieces(self) -> list[_Piece]:
        """Returns the pieces to be read, with their memory, unless that is only needed for a while."""
        size = self.source.nbytes
        parts = [None] * len(self._left) if self._is_for_a_while() else self._in_parts()
        return [
            _Piece(self, part, number, start, min(PIECE, size - start))
            for part, (number, start) in zip(parts, enumerate(range(0, size, PIECE)), strict=True)
        ]

    def part(self, number: int) -> torch.Tensor:
        """Returns the memory for a piece that has got none; for all pieces it is made when the first of them comes."""
        with self._lock:
            return (self._parts or self._in_parts())[number]

    def _is_for_a_while(self) -> bool:
        if self.into is not None:
            return not self._fills(self.into)
        return not self.casts and self.dtype != self.source.dtype

    def _fills(self, tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() and (self.casts or tensor.dtype == self.source.dtype)

    def _in_parts(self) -> Sequence[torch.Tensor]:
        """The memory that the file is read into, cut into pieces: of bytes, unless they are cast."""
        if self.into is not None and self._fills(self.into):
            self._memory = self.into
        else:
            dtype = self.dtype if self.casts else self.source.dtype
            with torch.inference_mode(False):
                self._memory = torch.empty(self.source.shape, dtype=dtype, device=self.device)
        if self.casts:
            self._parts = self._memory.view(-1).split(PIECE // self.source.dtype.itemsize)
        else:
            self._parts = bytes_of(self._memory).split(PIECE)
        return self._parts

    def arrived(self) -> None:
        """One more piece is there, or on its way in the stream of the device."""
        if self._left.pop() == 0:  # without a lock, at which threads would queue up
            self.end()

    def end(self) -> None:
        """All of it has been read."""
        if self._memory is None:
            self._in_parts()  # of a tensor without a byte
        memory, self._memory, self._parts = self._memory, None, ()
        assert memory is not None
        if self.into is not None:
            if memory is not self.into:
                self.into.copy_(memory)
        elif memory.dtype == self.dtype:
            self.result = memory
        else:
            with torch.inference_mode(False), torch.no_grad():
                self.result = memory.to(self.dtype)


class _Piece(NamedTuple):
    """A part of a tensor to be read, and its memory, if it is there already."""

    read: Read
    memory: torch.Tensor | None
    number: int
    start: int
    size: int

    def target(self) -> torch.Tensor:
        return self.read.part(self.number) if self.memory is None else self.memory


def read_all(reads: Sequence[Read]) -> None:
    """Reads tensors, several pieces at a time. On return all are there; after an error nothing is read any more."""
    with torch.inference_mode():
        for read in reads:
            if read.source.nbytes == 0:
                read.end()
        reads = [read for read in reads if read.source.nbytes]
        devices = dict.fromkeys(read.device for read in reads)
        ways = [_way_to(device, [read for read in reads if read.device == device]) for device in devices]
    begin, failed = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait()
        with torch.inference_mode(), contextlib.closing(_Hands()) as hands:
            try:
                for way in ways:
                    way.work(hands, failed)
            except BaseException:
                failed.set()
                raise

    # More than there are cores: a thread may wait for the disk.
    count = min(max(8, min(16, os.cpu_count() or 1)), sum(way.pieces for way in ways))
    if count == 0:
        return
    with ThreadPoolExecutor(count) as pool:
        try:
            workers = [pool.submit(work) for _ in range(count)]
            begin.set()  # not earlier: an interrupt leaves a thread that is being started to itself
            while wait(workers, timeout=0.1).not_done:  # an interrupt right before a wait does not end it
                pass
        except BaseException:
            failed.set()
            begin.set()
            raise
    for worker in workers:
        worker.result()
    for way in ways:
        way.finish()


class _Hands:
    """What a thread works with: the file it reads from, two buffers on the way to a device, one on that to the CPU."""

    def __init__(self) -> None:
        self.reader = Reader()
        # For each device its own: what tells that a buffer is free belongs to one device.
        self._buffers: defaultdict[torch.device, deque[_Buffer]] = defaultdict(deque)
        self._plain: torch.Tensor | None = None

    def plain(self) -> torch.Tensor:
        """Returns memory that is not locked: no GPU is woken up for what stays on the CPU."""
        if self._plain is None:
            self._plain = torch.empty(PIECE, dtype=torch.uint8, device="cpu")
        return self._plain

    def buffer(self, device: torch.device) -> _Buffer:
        """Returns a buffer that is free."""
        buffers = self._buffers[device]
        if len(buffers) < 2:
            buffers.append(_Buffer(device))
        buffers.rotate()
        buffers[0].wait()
        return buffers[0]

    def close(self) -> None:
        self.reader.close()


class _Buffer:
    """Memory on the way to a device, locked where the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.bytes = torch.empty(PIECE, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.view = self.bytes.numpy().data
        # Who waits for it sleeps: the cores are needed to read.
        self._free: Any = torch.get_device_module(device).Event(blocking=True) if pinned else None

    def fill(self, piece: _Piece, reader: Reader) -> torch.Tensor:
        """Reads a piece; returns its bytes."""
        whole = piece.size == PIECE
        piece.read.source.read_into(self.view if whole else self.view[: piece.size], piece.start, reader)
        return self.bytes if whole else self.bytes[: piece.size]

    def leaves_with(self, stream: torch.Stream) -> None:
        """It is free again when what was sent until now has been copied."""
        self._free.record(stream)

    def wait(self) -> None:
        """Returns as soon as it is free."""
        if self._free is not None:
            self._free.synchronize()


class _Way:
    """How tensors get to a device: here to the CPU, straight into their memory."""

    def __init__(self, device: torch.device, reads: Sequence[Read]) -> None:
        self._device = device
        self._todo: SimpleQueue[_Piece] = SimpleQueue()
        for read in reads:
            for piece in read.pieces():
                self._todo.put(piece)
        self.pieces = self._todo.qsize()

    def work(self, hands: _Hands, failed: threading.Event) -> None:
        """Brings one piece after the other, until none is left or one has failed; for several threads at once."""
        with contextlib.suppress(Empty):
            while not failed.is_set():
                piece = self._todo.get_nowait()
                self.bring(piece, hands)
                piece.read.arrived()

    def bring(self, piece: _Piece, hands: _Hands) -> None:
        source, target = piece.read.source, piece.target()
        if piece.read.casts:
            part = hands.plain()[: piece.size]
            source.read_into(part.numpy().data, piece.start, hands.reader)
            target.copy_(part.view(source.dtype))
        else:
            source.read_into(target.numpy().data, piece.start, hands.reader)

    def finish(self) -> None:
        """Called once, when all pieces have been sent: returns when they are there."""


class _DeviceWay(_Way):
    """By way of a buffer."""

    def bring(self, piece: _Piece, hands: _Hands) -> None:
        piece.target().copy_(hands.buffer(self._device).fill(piece, hands.reader))


class _CudaWay(_Way):
    """By way of two buffers in turn, in the stream of the caller."""

    def __init__(self, device: torch.device, reads: Sequence[Read]) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.current_stream(device)
        # Memory for all tensors at once: asking for each by itself takes longer than reading them.
        with self._module.stream(self._stream):
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(sum(read.new_bytes() for read in reads), dtype=torch.uint8, device=device)
            super().__init__(device, reads)

    def work(self, hands: _Hands, failed: threading.Event) -> None:
        with self._module.stream(self._stream):
            super().work(hands, failed)

    def bring(self, piece: _Piece, hands: _Hands) -> None:
        buffer = hands.buffer(self._device)
        piece.target().copy_(buffer.fill(piece, hands.reader), non_blocking=True)
        buffer.leaves_with(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


def _way_to(device: torch.device, reads: Sequence[Read]) -> _Way:
    kinds: dict[str, type[_Way]] = {"cpu": _Way, "cuda": _CudaWay}
    return kinds.get(device.type, _DeviceWay)(device, reads)
