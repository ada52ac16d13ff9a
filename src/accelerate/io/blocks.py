"""Writing files block by block, in several threads, touching each byte once. `read_tensors` reads them.

Each thread takes one block, copies it from the device, computes its checksum, and writes it. The bus, the checksums and
the disk work at the same time, and at most one block per thread is in memory besides the tensors themselves. In host
memory a block is handled in steps, so that the data is still in the processor's cache when it is written.
"""

from __future__ import annotations

import bisect
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import string_at
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from accelerate.constants import MANIFEST_NAME
from accelerate.devices.block_copies import BlockCopies, Scattered
from accelerate.devices.staging import bytes_of
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
SMALL = 1 << 12  # up to this size, pieces are moved with others
STEP = 1 << 20  # which the cache of a processor has room for
# How many files are written at once. A file system lets one writer into a file at a time, and all readers.
FILES = 3
# No more threads than there are processors: more of them would only take turns. And no more than eight: between two
# blocks each needs the interpreter, for which they then wait longer than they gain.
WRITERS = min(6, -(-(os.cpu_count() or 1) // FILES))
CHECKERS = min(8, os.cpu_count() or 1)  # which read, and take checksums


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


def piece(tensor: torch.Tensor) -> Piece:
    """A tensor as a piece of a file."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return bytes_of(tensor) if tensor.is_contiguous() else Scattered(tensor)


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


def summed_up(path: Path) -> FileEntry:
    """The entry of an existing file."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)

    def move(start: int) -> int:
        end, total, buffer = min(start + BLOCK, size), 0, memoryview(bytearray(STEP))
        for at in range(start, end, STEP):
            step = buffer[: min(STEP, end - at)]
            if not disk.read(descriptor, [step], at):
                raise damaged(path)  # it has become shorter
            total = crc32(step, total)
        return total

    try:
        return FileEntry(size, _each_block(size, move, CHECKERS))
    finally:
        os.close(descriptor)


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def damaged(path: Path | str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: its checksum differs from the one it was written with; copy the checkpoint again, or load "
        f"another one; if you replaced the file on purpose, delete {MANIFEST_NAME}."
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
