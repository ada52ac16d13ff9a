"""Moving tensors to and from files: block by block, in several threads, touching each byte once.

Each thread takes one block, copies it from the device or reads it from disk, computes its checksum, and passes it on.
The bus, the checksums and the disk work at the same time, and at most one block per thread is in memory besides the
tensors themselves. In host memory a block is handled in steps, so that the data is still in the processor's cache when
it is written. Data that is only verified, or that stays in host memory, is read from the page cache without a copy.
"""

from __future__ import annotations

import bisect
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import string_at
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from accelerate.constants import MANIFEST_NAME
from accelerate.devices.block_copies import BlockCopies, Scattered
from accelerate.devices.staging import Free, Job, Lane, lane_of_caller, run_tasks
from accelerate.errors import CheckpointError
from accelerate.io import disk
from accelerate.io.disk import threads


def combine_by_zlib(first: int, second: int, length: int) -> int:
    """The checksum of two byte strings joined, from the checksum of each. length: that of the second."""
    zeros = bytes(length)
    return zlib.crc32(zeros, first) ^ zlib.crc32(zeros) ^ second


try:
    from isal.isal_zlib import crc32, crc32_combine  # the same sums, seven times as fast
except ImportError:
    crc32, crc32_combine = zlib.crc32, combine_by_zlib

# Checksums are of blocks, so that several threads can take them.
BLOCK = 1 << 22
SMALL = 1 << 12  # of what is not worth to be moved by itself
STEP = 1 << 20  # which the cache of a processor has room for
# How many files are written at once. A file system lets one writer into a file at a time, and all readers.
FILES = 3
# No more threads than there are processors: more of them would only take turns. And no more than eight: between two
# blocks each needs the interpreter, for which they then wait longer than they gain.
WRITERS = min(6, -(-(os.cpu_count() or 1) // FILES))
READERS = min(8, os.cpu_count() or 1)


class FileEntry(NamedTuple):
    """What a manifest says of a file: its size, and the checksum of each of its blocks."""

    size: int
    crc32: list[int]


@dataclass(frozen=True)
class Late:
    """A piece that depends on the checksums of the others, and is written after them."""

    length: int
    make: Callable[[list[int]], bytes]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> bytes:
        """Zeros, until the real bytes are known."""
        return bytes(part.stop - part.start)


# A piece of a file: bytes, a flat tensor of uint8 on any device, or a tensor whose bytes are in another order.
Piece = bytes | torch.Tensor | Scattered
_T = TypeVar("_T")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; its own memory, if it is contiguous."""
    # By strides: a single element may keep those of the row it was taken from, which no view of bytes has.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def piece(tensor: torch.Tensor) -> Piece:
    """A tensor as a piece of a file."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return flat(tensor) if tensor.is_contiguous() else Scattered(tensor)


def joined(contents: Iterable[bytes | torch.Tensor]) -> list[Piece]:
    """Pieces of a file. Small pieces in host memory are joined: handling each would cost more than copying it."""
    pieces: list[Piece] = []
    small: list[bytes] = []
    for content in contents:
        if isinstance(content, torch.Tensor):
            if content.device.type != "cpu" or content.nbytes > SMALL:
                pieces += ([b"".join(small)] if small else []) + [piece(content)]
                small = []
                continue
            content = in_bytes(content)
        small.append(content)
    return pieces + ([b"".join(small)] if small else [])


def in_bytes(tensor: torch.Tensor) -> bytes:
    """The content of a small tensor in host memory."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def write_file(path: Path, pieces: Sequence[Piece | Late]) -> FileEntry:
    """Write pieces to a new file and flush it to disk. Returns its size and checksums."""
    ends = list(accumulate(len(piece) for piece in pieces))
    size = ends[-1] if ends else 0
    devices = {piece.device for piece in pieces if not isinstance(piece, (bytes, Late))}
    copies = BlockCopies([device for device in devices if device.type != "cpu"])
    with _named(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def move(start: int) -> list[_Sum]:
        end = min(start + BLOCK, size)
        parts = list(_within(ends, start, end))
        sums, at = [_Sum(number, first, last - first) for number, first, last in parts], start
        current, left = 0, sums[0].length
        content = _on_host([pieces[number][first:last] for number, first, last in parts], copies)
        for step in _in_steps(content, STEP):
            for view in step:
                sums[current].value = crc32(view, sums[current].value)
                left -= len(view)
                if not left and current + 1 < len(sums):
                    current, left = current + 1, sums[current + 1].length
            disk.write(descriptor, step, at)
            at += sum(map(len, step))
        if size > BLOCK:
            disk.start_flush(descriptor, start, end - start)
        return sums

    try:
        with _named(path):
            blocks = _each_block(size, move, WRITERS)
            if late := {number: piece for number, piece in enumerate(pieces) if isinstance(piece, Late)}:
                parts = _by_piece(len(pieces), blocks)
                known = [_combined(sums) if sums else 0 for sums in parts]
                for number, piece in late.items():
                    content = piece.make(known)
                    disk.write(descriptor, [content], ends[number] - len(content))
                    for part in parts[number]:
                        part.value = crc32(content[part.first : part.first + part.length])
            disk.sync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(size, [_combined(sums) for sums in blocks])


@dataclass
class _Sum:
    """The checksum of the part of a piece that lies in one block."""

    piece: int
    first: int
    length: int
    value: int = 0


def _combined(sums: Sequence[_Sum]) -> int:
    total = sums[0].value
    for following in sums[1:]:
        total = crc32_combine(total, following.value, following.length)
    return total


def _by_piece(count: int, blocks: Iterable[list[_Sum]]) -> list[list[_Sum]]:
    parts: list[list[_Sum]] = [[] for _ in range(count)]
    for sums in blocks:
        for part in sums:
            parts[part.piece].append(part)
    return parts


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
        raise damaged(path)
    if content is None:
        content = mapped(path) if entry is not None else torch.empty(0)
    most = max(READERS // share[1], 1)
    devices = list(dict.fromkeys(tensor.device for _, tensor in places if _is_away(tensor)))
    # Nearly always there is one device at most: what is for others is read again, by itself.
    first = [(at, tensor) for at, tensor in places if not _is_away(tensor) or tensor.device == devices[0]]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        reading = _Reading(path, descriptor, size, first, entry, share, content)
        if devices:
            reading.by_buffers(devices[0], most)
        else:
            _each_block(size, reading.block, most)
        for device in devices[1:]:
            others = [(at, tensor) for at, tensor in places if _is_away(tensor) and tensor.device == device]
            _Reading(path, descriptor, size, others, None, share, content).by_buffers(device, most)
    finally:
        os.close(descriptor)


def _is_away(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


@dataclass
class _Reading:
    """One file on its way into tensors in host memory and on one device."""

    path: Path
    descriptor: int
    size: int
    places: Sequence[tuple[int, torch.Tensor]]
    entry: FileEntry | None
    share: tuple[int, int]
    content: torch.Tensor

    def __post_init__(self) -> None:
        self.starts = [offset for offset, _ in self.places]

    def by_buffers(self, device: torch.device, most: int) -> None:
        """Read all blocks, those for the device through pinned buffers, on the caller's stream."""
        job = Job()
        tasks = [_Block(job, self, start) for start in range(0, self.size, BLOCK)]
        run_tasks(job, tasks, lane_of_caller(device), BLOCK, most, "checkpoint-reader")

    def block(self, start: int, lane: Lane | None = None, free: Free | None = None) -> None:
        """Read one block, and verify its checksum before any of it is sent to a device."""
        end = min(start + BLOCK, self.size)
        expected = None
        if self.entry is not None and start // BLOCK % self.share[1] == self.share[0]:
            expected = self.entry.crc32[start // BLOCK]
        wanted = list(_overlapping(self.places, self.starts, start, end))
        if not wanted and expected is None:
            return
        # What stays on the host is read to its place, the rest of the block to a buffer.
        away = [(at, tensor) for at, tensor in wanted if _is_away(tensor)]
        here = [(at, tensor) for at, tensor in wanted if not _is_away(tensor)]
        checked, total = expected is not None, None
        if not away:
            total = _from_map(self.content[start:end], [(at - start, tensor) for at, tensor in here], checked)
        if total is None:
            # All of what is to be copied to a device has to be there at once, and is read so: between two steps the
            # threads, as many as there are processors, wait for each other. What is only summed up has not.
            buffer = free() if away and free is not None else None
            step = STEP if buffer is None else BLOCK
            view = _view(torch.empty(step, dtype=torch.uint8, device="cpu")) if buffer is None else buffer.view
            memory = _in_steps(_filled_up(here, view, start, end), step)
            total = _read_into(self.descriptor, memory, start, self.path, checked)
        if checked and total != expected:
            raise damaged(self.path)
        if away and lane is not None and buffer is not None:
            for at, tensor in away:
                lane.send([tensor], buffer.bytes[at - start : at - start + len(tensor)], buffer.left)


class _Block(NamedTuple):
    """One block, as a task for a thread with pinned buffers."""

    job: Job
    reading: _Reading
    start: int

    def bring(self, lane: Lane, free: Free) -> None:
        self.reading.block(self.start, lane, free)


def mapped(path: Path) -> torch.Tensor:
    """The bytes of a file, mapped without a copy; empty if the system cannot map it."""
    with suppress(RuntimeError):
        if size := path.stat().st_size:
            return torch.from_file(str(path), size=size, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8)


def summed_up(path: Path) -> FileEntry:
    """The entry of an existing file."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)

    def move(start: int) -> int:
        content = _filled_up(
            [], _view(torch.empty(STEP, dtype=torch.uint8, device="cpu")), start, min(start + BLOCK, size)
        )
        return _read_into(descriptor, _in_steps(content, STEP), start, path, True)

    try:
        return FileEntry(size, _each_block(size, move, READERS))
    finally:
        os.close(descriptor)


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, its checksum is not the one it was written with: copy the checkpoint again, load another "
        f"one, or if it was replaced on purpose, delete {MANIFEST_NAME}."
    )


def _on_host(pieces: list[Piece], copies: BlockCopies) -> list[Any]:
    """Views of the pieces of one block in host memory."""
    filled, views = 0, list[Any]()
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            views.append(piece)
        elif isinstance(piece, torch.Tensor) and piece.device.type == "cpu":
            views.append(_view(piece))
        else:
            place = copies.buffer(BLOCK)[filled : filled + len(piece)]
            moved += piece.onto(place) if isinstance(piece, Scattered) else [(place, piece)]
            views.append(_view(place))
            filled += len(piece)
    copies.copy(moved)
    return views


def _each_block(size: int, move: Callable[[int], _T], most: int) -> list[_T]:
    """Call `move` with the offset of every block, in several threads if there are many blocks."""
    starts = range(0, size, BLOCK)
    if min(most, len(starts)) <= 1:
        return [move(start) for start in starts]
    with threads(min(most, len(starts))) as pool:
        futures = [pool.submit(move, start) for start in starts]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _sum(content: Sequence[Any], total: int = 0) -> int:
    for view in content:
        total = crc32(view, total)
    return total


def _from_map(block: torch.Tensor, places: Sequence[tuple[int, torch.Tensor]], checked: bool) -> int | None:
    """Copy a block of a mapped file into tensors. Returns its checksum, or None if the block has to be read."""
    if not len(block) or not disk.bring_in(block.data_ptr(), len(block)):
        return None
    source, targets = block.numpy(), [(at, tensor.numpy()) for at, tensor in places]
    for _, target in targets:
        disk.get_pages(target.ctypes.data, len(target))
    total = 0
    size = STEP if targets else len(source)
    for start in range(0, len(source), size):
        step = source[start : start + size]
        total = _sum([step], total) if checked else 0
        for at, target in targets:
            first, last = max(start, at), min(start + len(step), at + len(target))
            if first < last:  # by NumPy: see `host_memory.copy`
                np.copyto(target[first - at : last - at], source[first:last])
    return total


def _read_into(descriptor: int, steps: Iterable[list[memoryview]], offset: int, path: Path, checked: bool) -> int:
    """Read a file into memory from an offset on. Returns its checksum if `checked`."""
    total = 0
    for step in steps:
        if not disk.read(descriptor, step, offset):
            raise damaged(path)  # it has become shorter
        offset += sum(map(len, step))
        if checked:
            total = _sum(step, total)
    return total


def _within(ends: list[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The pieces between two offsets of a file: the number of each, and the start and end of the range within it."""
    number = bisect.bisect_right(ends, start)
    while number < len(ends):
        first = ends[number - 1] if number else 0
        if first >= end:
            return
        if ends[number] > first:
            yield number, max(start - first, 0), min(end, ends[number]) - first
        number += 1


def _overlapping(
    places: Sequence[tuple[int, torch.Tensor]], starts: list[int], start: int, end: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """The slices of tensors that lie between two offsets of a file."""
    number = max(bisect.bisect_right(starts, start) - 1, 0)
    while number < len(places) and places[number][0] < end:
        offset, tensor = places[number]
        first, last = max(start, offset), min(end, offset + len(tensor))
        if first < last:
            yield first, tensor[first - offset : last - offset]
        number += 1


def _filled_up(
    places: list[tuple[int, torch.Tensor]], buffer: memoryview, start: int, end: int
) -> Iterator[memoryview]:
    """Memory to read a range of a file into: tensors where they have an offset in it, a buffer for the gaps.

    The buffer holds the whole range, or one step of it and is then reused in each step.
    """

    def rest(at: int, until: int) -> Iterator[memoryview]:
        while at < until:
            place = (at - start) % len(buffer)
            yield (piece := buffer[place : place + until - at])
            at += len(piece)

    at = start
    for offset, tensor in places:
        yield from rest(at, offset)
        yield _view(tensor)
        at = offset + len(tensor)
    yield from rest(at, end)


def _in_steps(content: Iterable[Any], size: int) -> Iterator[list[memoryview]]:
    """Buffers in groups of `size` bytes each; the last group has the rest."""
    group: list[memoryview] = []
    room = size
    for piece in content:
        view = memoryview(piece).cast("B")
        while len(view):
            group.append(view[:room])
            room -= len(group[-1])
            view = view[len(group[-1]) :]
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to errors of an open file, which do not mention it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
