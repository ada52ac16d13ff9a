"""Reading many tensors at once, each straight to where it belongs.

Several threads read pieces of the files. For the CPU they read straight into the tensor, or cast each piece as it
arrives. For a device they use pinned buffers (devices/staging.py) on the caller's stream, so a model of any size needs
only a few hundred megabytes of host memory.

Everything runs in inference mode, where any tensor can be written to. New tensors are created outside of it, so that
they are ordinary tensors.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from accelerate.devices import kind_of
from accelerate.devices.staging import Free, Job, Lane, bytes_of, lane_of_caller, run_tasks
from accelerate.errors import CheckpointError
from accelerate.io.stored_tensors import StoredTensor

# Small enough for little locked memory, big enough for a disk and a bus to be at full speed.
PIECE = 8 * 2**20


class Read:
    """One tensor to be read.

    device, dtype: where, and as what it is wanted; it is cast over there. into: a tensor that gets the values,
    instead of a new one.
    """

    def __init__(
        self, source: StoredTensor, device: torch.device, dtype: torch.dtype, into: torch.Tensor | None = None
    ) -> None:
        self.source = source
        self.device = device
        self.dtype = dtype
        self.into = into
        self.result: torch.Tensor | None = into
        # On the CPU each piece is cast as it comes, elsewhere the whole when it is there.
        self.casts: bool = device.type == "cpu" and (dtype if into is None else into.dtype) != source.dtype
        self.by_buffers: bool = self.casts or device.type != "cpu"
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()
        self._left = list(range(len(range(0, source.nbytes, PIECE))))

    def new_bytes(self) -> int:
        """How much memory the tensor takes, as the allocator of a GPU rounds it."""
        count = 0 if self.into is not None else math.prod(self.source.shape) * self.dtype.itemsize
        return count + -count % 512 if count > 2**20 else 0

    def pieces(self, job: Job) -> list[_FilePart]:
        """The pieces to read, with their memory unless it is only needed for a while."""
        size = self.source.nbytes
        parts = [None] * len(self._left) if self._is_for_a_while() else self._in_parts()
        return [
            _FilePart(job, self, part, number, start, min(PIECE, size - start))
            for part, (number, start) in zip(parts, enumerate(range(0, size, PIECE)), strict=True)
        ]

    def part(self, number: int) -> torch.Tensor:
        """The memory of a piece that has none yet; allocated for all pieces when the first of them arrives."""
        with self._lock:
            return (self._parts or self._in_parts())[number]

    def _is_for_a_while(self) -> bool:
        if self.into is not None:
            return not self._fills(self.into)
        return not self.casts and self.dtype != self.source.dtype

    def _fills(self, tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() and (self.casts or tensor.dtype == self.source.dtype)

    def _in_parts(self) -> Sequence[torch.Tensor]:
        """The memory that the file is read into, cut into pieces: bytes, unless they are cast."""
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
        """One more piece has arrived, or is on its way on the device's stream."""
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


class _FilePart(NamedTuple):
    """A part of a tensor to be read, and its memory, if it is there already."""

    job: Job
    read: Read
    memory: torch.Tensor | None
    number: int
    start: int
    size: int

    def bring(self, lane: Lane, free: Free) -> None:
        with torch.inference_mode():
            read = self.read
            memory = read.part(self.number) if self.memory is None else self.memory
            if read.by_buffers:
                buffer = free()
                view, content = buffer.part(self.size)
                self._fill(view)
                lane.send([memory], content.view(read.source.dtype) if read.casts else content, buffer.left)
            else:
                self._fill(memory.numpy().data)
            read.arrived()

    def _fill(self, view: memoryview) -> None:
        source = self.read.source
        try:
            source.read(view, self.start, self.job.files)
        except OSError as error:
            reason = error.strerror or "it has become shorter"
            raise CheckpointError(f"{source.path} cannot be read ({reason}): load another checkpoint.") from error


def read_all(reads: Sequence[Read]) -> None:
    """Read tensors, several pieces at a time. All are complete on return; after an error nothing more is read."""
    with torch.inference_mode():
        for read in reads:
            if read.source.nbytes == 0:
                read.end()
    full = [read for read in reads if read.source.nbytes]
    for device in dict.fromkeys(read.device for read in full):
        _read_to(device, [read for read in full if read.device == device])


def _read_to(device: torch.device, reads: Sequence[Read]) -> None:
    job = Job()
    with torch.inference_mode():
        if (kind := kind_of(device)) is not None:
            # Memory for all tensors at once: asking for each by itself may take longer than reading them.
            kind.reserve(sum(read.new_bytes() for read in reads), device)
        tasks = [piece for read in reads for piece in read.pieces(job)]
    # More threads than there are cores: one may wait for the disk.
    run_tasks(job, tasks, lane_of_caller(device), PIECE, max(8, min(16, os.cpu_count() or 1)), "weight-reader")
