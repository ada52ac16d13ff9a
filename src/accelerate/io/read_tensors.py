"""Reading files into tensors: the one way from the disk to the host and to a device.

Each source, a file or a stored tensor, is cut into pieces. Several threads take one piece at a time, verify its
checksum, and pass on what it holds of each tensor. What stays as it is in host memory goes straight to its place. What
goes to a device, or is cast, is read to pinned buffers (devices/staging.py), and sent on the caller's stream. So the
disk, the checksums and the bus work at the same time, and a model of any size needs only a few hundred megabytes of
host memory. Files that are mapped, and whose bytes stay on the host, are copied from the page cache.

Everything runs in inference mode, where any tensor can be written to. New tensors are created outside of it, so that
they are ordinary tensors.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from accelerate.devices import kind_of
from accelerate.devices.block_copies import rows_between
from accelerate.devices.staging import Buffer, Free, Job, Lane, bytes_of, lane_of_caller, run_tasks
from accelerate.errors import CheckpointError
from accelerate.io import blocks, disk
from accelerate.io.blocks import FileEntry
from accelerate.io.stored_tensors import FileRange, StoredTensor, mapped

# Of tensors without checksums: small enough for little locked memory, big enough for a disk and a bus to be at full
# speed.
PIECE = 8 * 2**20
# More threads than there are cores: one may wait for the disk. Those that take checksums keep a core busy.
READERS = max(8, min(16, os.cpu_count() or 1))

_CPU = torch.device("cpu")


@dataclass(eq=False)
class Read:
    """One tensor to be read.

    device, dtype: where, and as what it is wanted; it is cast over there. into: a tensor that gets the values,
    instead of a new one.
    """

    source: StoredTensor
    device: torch.device
    dtype: torch.dtype
    into: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.result = self.into

    def new_bytes(self) -> int:
        """How much memory the tensor takes, as the allocator of a GPU rounds it."""
        count = 0 if self.into is not None else math.prod(self.source.shape) * self.dtype.itemsize
        return count + -count % 512 if count > 2**20 else 0

    def begin(self) -> _Reading:
        """Allocate the result, unless it is there."""
        if self.result is None:
            with torch.inference_mode(False):
                self.result = torch.empty(self.source.shape, dtype=self.dtype, device=self.device)
        memory, stored = self.result, self.source.dtype
        if memory.is_contiguous() and memory.dtype == stored:
            place = _Place(0, bytes_of(memory))
        elif _is_away(memory):
            place = _Place(0, memory, stored, _DeviceCast(memory, stored, -(-self.source.nbytes // PIECE)))
        else:
            place = _Place(0, memory.view(-1) if memory.is_contiguous() else memory, stored)
        return _Reading(self.source, [place])


def read_all(reads: Sequence[Read]) -> None:
    """Read tensors, several pieces at a time. All are complete on return; after an error nothing more is read."""
    for device in dict.fromkeys(read.device for read in reads):
        wanted = [read for read in reads if read.device == device]
        with torch.inference_mode():
            if (kind := kind_of(device)) is not None:
                # Memory for all tensors at once: asking for each by itself may take longer than reading them.
                kind.reserve(sum(read.new_bytes() for read in wanted), device)
            readings = [read.begin() for read in wanted]
        _read(readings, device, PIECE, READERS)


def read_file(
    path: Path,
    places: Sequence[tuple[int, torch.Tensor]] = (),
    entry: FileEntry | None = None,
    share: tuple[int, int] = (0, 1),
    content: torch.Tensor | None = None,
) -> None:
    """Read a file into tensors at given offsets, and verify its checksums on the way.

    places: pairs of an offset and a flat uint8 tensor, sorted by offset. entry: the file's entry in the manifest.
    share: (index, count) of the processes that read the same file at once; each verifies its share of the blocks.
    content: the bytes of the file from `mapped`, if it is mapped already, since mapping is half of the work.
    """
    size = path.stat().st_size
    if entry is not None and size != entry.size:  # of blocks that are gone, no checksum would tell
        raise blocks.damaged(path)
    if content is None and entry is not None:
        content = mapped(path)
    index, count = share
    sums = {} if entry is None else dict(list(enumerate(entry.crc32))[index::count])
    source = FileRange(str(path), 0, (size,), torch.uint8)
    away = list(dict.fromkeys(tensor.device for _, tensor in places if _is_away(tensor)))
    first = away[0] if away else _CPU
    # Nearly always there is one device at most: what is for others is read again, by itself.
    by_device: dict[torch.device, list[_Place]] = {first: []}
    for offset, tensor in places:
        by_device.setdefault(tensor.device if _is_away(tensor) else first, []).append(_Place(offset, tensor))
    for device, own in by_device.items():
        reading = _Reading(source, own, sums if device == first else {}, content)
        _read([reading], device, blocks.BLOCK, max(blocks.CHECKERS // count, 1))


def _is_away(tensor: torch.Tensor) -> bool:
    return not tensor.is_cpu


class _DeviceCast:
    """A tensor on a device that gets its values when all their bytes are there: one kernel, and not one per piece.

    stored: the dtype to cast from. pieces: how many arrive.
    """

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype, pieces: int) -> None:
        self._tensor = tensor
        self._stored = stored
        self._left = list(range(pieces))
        self._lock = threading.Lock()
        self._bytes: torch.Tensor | None = None

    def bytes(self) -> torch.Tensor:
        """The memory that they arrive in; allocated for the first of them, so few tensors have theirs at a time."""
        with self._lock:
            if self._bytes is None:
                size = self._tensor.numel() * self._stored.itemsize
                self._bytes = torch.empty(size, dtype=torch.uint8, device=self._tensor.device)
            return self._bytes

    def arrived(self) -> None:
        """One more piece is there, or on its way on the same stream."""
        if self._left.pop() == 0:  # without a lock, at which threads would queue up
            self._tensor.copy_(self.bytes().view(self._stored).view(self._tensor.shape))
            self._bytes = None


class _Place(NamedTuple):
    """A tensor that is read from a source.

    offset: where its bytes begin. tensor: what gets them: flat bytes, or if `stored` is given, elements in any order of
    memory, cast from that dtype; on a device by `cast`.
    """

    offset: int
    tensor: torch.Tensor
    stored: torch.dtype | None = None
    cast: _DeviceCast | None = None

    def between(self, start: int, end: int) -> _Part | None:
        """The part of it that lies between two offsets of the source."""
        width = 1 if self.stored is None else self.stored.itemsize
        size = self.tensor.numel() * width
        first, last = max(start - self.offset, 0), min(end - self.offset, size)
        if first >= last:
            return None
        outs = [self.tensor]
        if last - first < size and self.cast is None:
            outs = list(rows_between(self.tensor, first // width, last // width))
        return _Part(self.offset + first - start, last - first, outs, self, first)


class _Part(NamedTuple):
    """What a piece holds of one tensor.

    at, size: where its bytes are in the piece. outs: what gets them, in order. first: its first byte in the tensor.
    """

    at: int
    size: int
    outs: list[torch.Tensor]
    place: _Place
    first: int

    @property
    def is_direct(self) -> bool:
        """Whether the bytes are read straight to their place."""
        return self.place.stored is None and not _is_away(self.place.tensor)

    def send(self, lane: Lane, buffer: Buffer) -> None:
        """Send it from the buffer that has the piece."""
        content = buffer.bytes.narrow(0, self.at, self.size)
        stored, cast = self.place.stored, self.place.cast
        if stored is None:
            lane.send(self.outs, content, buffer.left)
        elif cast is not None:
            lane.send([cast.bytes().narrow(0, self.first, self.size)], content, buffer.left)
            cast.arrived()
        else:
            values, at = content.view(stored), 0
            for out in self.outs:
                out.copy_(values.narrow(0, at, out.numel()).view(out.shape))
                at += out.numel()


@dataclass
class _Reading:
    """A source, and what is read from it.

    places: sorted by offset. sums: the checksums that pieces should have, by their numbers; others are not verified.
    content: the bytes of the source, if it is mapped.
    """

    source: StoredTensor
    places: Sequence[_Place]
    sums: Mapping[int, int] = field(default_factory=dict)
    content: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._offsets = [place.offset for place in self.places]

    def parts(self, start: int, end: int) -> list[_Part]:
        """What lies between two offsets."""
        first, last = max(bisect_right(self._offsets, start) - 1, 0), bisect_left(self._offsets, end)
        found = [place.between(start, end) for place in self.places[first:last]]
        return [part for part in found if part is not None]


def _read(readings: Sequence[_Reading], device: torch.device, size: int, most: int) -> None:
    """Read from sources, in pieces of `size` bytes, by at most so many threads."""
    job = Job()
    tasks = [
        _Piece(job, reading, number, start, min(size, reading.source.nbytes - start))
        for reading in readings
        for number, start in enumerate(range(0, reading.source.nbytes, size))
    ]
    run_tasks(job, tasks, lane_of_caller(device), size, most, "reader")


class _Piece(NamedTuple):
    """A piece of a source, as a task for one thread."""

    job: Job
    reading: _Reading
    number: int
    start: int
    size: int

    def bring(self, lane: Lane, free: Free) -> None:
        """Read it, and verify its checksum before any of it is sent to a device."""
        end, expected = self.start + self.size, self.reading.sums.get(self.number)
        with torch.inference_mode():
            parts = self.reading.parts(self.start, end)
            if not parts and expected is None:
                return
            direct = [part for part in parts if part.is_direct]
            staged = [part for part in parts if not part.is_direct]
            total = buffer = None
            if not staged and self.reading.content is not None:
                total = _from_map(self.reading.content[self.start : end], parts, expected is not None)
            if total is None:
                if sum(part.size for part in direct) < self.size:
                    buffer = free()
                # All of what is sent has to be there at once, and is read so: between two steps the threads wait for
                # each other. What is only summed up has not.
                step = self.size if staged or expected is None else blocks.STEP
                total = self._filled(_memory(direct, buffer, self.size), step, expected is not None)
            if expected is not None and total != expected:
                raise blocks.damaged(self.reading.source.path)
            for part in staged:
                assert buffer is not None
                part.send(lane, buffer)

    def _filled(self, memory: Iterator[memoryview], step: int, checked: bool) -> int:
        """Read it into memory. Returns its checksum if `checked`."""
        source, at, total = self.reading.source, self.start, 0
        try:
            for whole in memory:
                for view in (whole[first : first + step] for first in range(0, len(whole), step)):
                    source.read(view, at, self.job.files)
                    at += len(view)
                    total = blocks.crc32(view, total) if checked else 0
        except OSError as error:
            reason = error.strerror or "it has become shorter"
            raise CheckpointError(f"{source.path} cannot be read ({reason}): load another checkpoint.") from error
        return total


def _memory(direct: Sequence[_Part], buffer: Buffer | None, size: int) -> Iterator[memoryview]:
    """Memory to read a piece into: tensors where they have a part of it, the buffer for the gaps."""
    at = 0
    for part in direct:
        if at < part.at and buffer is not None:
            yield buffer.view[at : part.at]
        yield part.outs[0].numpy().data
        at = part.at + part.size
    if at < size and buffer is not None:
        yield buffer.view[at:size]


def _from_map(block: torch.Tensor, parts: Sequence[_Part], checked: bool) -> int | None:
    """Copy a block of a mapped file into tensors. Returns its checksum, or None if the block has to be read."""
    if not len(block) or not disk.bring_in(block.data_ptr(), len(block)):
        return None
    source, targets = block.numpy(), [(part.at, part.outs[0].numpy()) for part in parts]
    for _, target in targets:
        disk.get_pages(target.ctypes.data, len(target))
    total = 0
    size = blocks.STEP if targets else len(source)
    for start in range(0, len(source), size):
        step = source[start : start + size]
        total = blocks.crc32(step, total) if checked else 0
        for at, target in targets:
            first, last = max(start, at), min(start + len(step), at + len(target))
            if first < last:  # by NumPy: see `host_memory.copy`
                np.copyto(target[first - at : last - at], source[first:last])
    return total
