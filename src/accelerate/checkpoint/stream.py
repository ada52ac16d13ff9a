"""Between tensors and a file: block by block, in several threads, each byte once.

A thread takes one block: it copies it from the device or reads it from the disk, sums it up, and passes it on. So the
bus, the checksums and the disk work at the same time, and no more than one block per thread is in memory besides the
tensors themselves. In host memory a block goes step by step: what was summed up is still in the processor's cache when
it is written. What is compared, or stays in host memory, is taken from where the system has it, without a copy between.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import string_at
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from accelerate.checkpoint import disk, layout
from accelerate.checkpoint.disk import Entry
from accelerate.checkpoint.spans import Scattered, filled_up, in_steps, overlapping, within
from accelerate.checkpoint.threads import threads
from accelerate.errors import CheckpointError


def combine_by_zlib(first: int, second: int, length: int) -> int:
    """The checksum of two things one after the other, from those of both. length: of the second."""
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


@dataclass(frozen=True)
class Late:
    """A piece that is made of the checksums of the others, when those have been written."""

    length: int
    make: Callable[[list[int]], bytes]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> bytes:
        """What is written at first."""
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
    """Pieces of a file. Small ones on the host are made one: each by itself would take longer than what is in it."""
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


def write_file(path: Path, pieces: Sequence[Piece | Late]) -> Entry:
    """Write pieces one after the other to a new file, flushed to the disk; returns its size and checksums."""
    ends = list(accumulate(len(piece) for piece in pieces))
    size = ends[-1] if ends else 0
    _settle(piece.device for piece in pieces if not isinstance(piece, (bytes, Late)))
    lanes = _Lanes()
    with _named(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def move(start: int) -> list[_Sum]:
        end = min(start + BLOCK, size)
        parts = list(within(ends, start, end))
        sums, at = [_Sum(number, first, last - first) for number, first, last in parts], start
        current, left = 0, sums[0].length
        content = lanes.on_host([pieces[number][first:last] for number, first, last in parts])
        for step in in_steps(content, STEP):
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
    return Entry(size, [_combined(sums) for sums in blocks])


@dataclass
class _Sum:
    """The checksum of what a block has of a piece."""

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
    entry: Entry | None = None,
    share: tuple[int, int] = (0, 1),
    content: torch.Tensor | None = None,
) -> None:
    """Fill tensors with what a file has at their offsets, and compare its checksums on the way.

    places: offsets with flat tensors of uint8, in their order. entry: what the manifest says of the file.
    share: which of how many processes this one is that read the same file at once: each compares its part.
    content: the bytes of the file as `mapped` gives them, if it is mapped already: to map it is half of the work.
    """
    size = path.stat().st_size
    if entry is not None and size != entry.size:  # of blocks that are gone, no checksum would tell
        raise damaged(path)
    starts = [offset for offset, _ in places]
    _settle(tensor.device for _, tensor in places)
    lanes = _Lanes()
    if content is None:
        content = mapped(path) if entry is not None else torch.empty(0)
    descriptor = os.open(path, os.O_RDONLY)

    def move(start: int) -> int:
        end = min(start + BLOCK, size)
        checked = entry is not None and start // BLOCK % share[1] == share[0]
        wanted = list(overlapping(places, starts, start, end))
        if not wanted and not checked:
            return 0
        # What stays on the host is read to its place, the rest of the block to a buffer.
        away = [(at, tensor) for at, tensor in wanted if tensor.device.type != "cpu"]
        here = [(at, tensor) for at, tensor in wanted if tensor.device.type == "cpu"]
        total = None if away else _from_map(content[start:end], [(at - start, tensor) for at, tensor in here], checked)
        if total is None:
            # All of what is to be copied to a device has to be there at once, and is read so: between two steps the
            # threads, as many as there are processors, wait for each other. What is only summed up has not.
            step = BLOCK if away else STEP
            buffer = lanes.buffer(any(tensor.device.type == "cuda" for _, tensor in away), step)
            memory = in_steps(filled_up(here, _view(buffer), start, end), step)
            total = _read_into(descriptor, memory, start, path, checked)
        if checked and total != entry.crc32[start // BLOCK]:  # type: ignore[union-attr]
            raise damaged(path)
        lanes.copy([(tensor, buffer[at - start : at - start + len(tensor)]) for at, tensor in away])
        return 0

    try:
        _each_block(size, move, max(READERS // share[1], 1))
    finally:
        os.close(descriptor)


def mapped(path: Path) -> torch.Tensor:
    """The bytes of a file without a copy, where the system can map it, and else no bytes."""
    with suppress(RuntimeError):
        if size := path.stat().st_size:
            return torch.from_file(str(path), size=size, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8)


def summed_up(path: Path) -> Entry:
    """The entry of a file that is there already."""
    size = path.stat().st_size
    lanes = _Lanes()
    descriptor = os.open(path, os.O_RDONLY)

    def move(start: int) -> int:
        content = filled_up([], _view(lanes.buffer(False, STEP)), start, min(start + BLOCK, size))
        return _read_into(descriptor, in_steps(content, STEP), start, path, True)

    try:
        return Entry(size, _each_block(size, move, READERS))
    finally:
        os.close(descriptor)


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, its checksum is not the one it was written with: copy the checkpoint again, load another "
        f"one, or if it was replaced on purpose, delete {layout.MANIFEST}."
    )


class _Lanes:
    """What each thread needs to move a block: a buffer of its own, and a way to the device."""

    def __init__(self) -> None:
        self._own = threading.local()

    def buffer(self, pinned: bool, size: int = BLOCK) -> torch.Tensor:
        buffers: dict[tuple[bool, int], torch.Tensor] = self._own.__dict__.setdefault("buffers", {})
        if (pinned, size) not in buffers:
            buffers[pinned, size] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return buffers[pinned, size]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        streams: dict[torch.device, torch.cuda.Stream] = self._own.__dict__.setdefault("streams", {})
        if device not in streams:
            torch.cuda.set_device(device)  # of this thread, which would else begin with the first one
            streams[device] = torch.cuda.Stream(device)
        return streams[device]

    def on_host(self, pieces: list[Piece]) -> list[Any]:
        """Views of the pieces of one block in host memory."""
        devices = {piece.device.type for piece in pieces if not isinstance(piece, bytes)}
        filled, views = 0, list[Any]()
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in pieces:
            if isinstance(piece, bytes):
                views.append(piece)
            elif isinstance(piece, torch.Tensor) and piece.device.type == "cpu":
                views.append(_view(piece))
            else:
                place = self.buffer("cuda" in devices)[filled : filled + len(piece)]
                copies += piece.onto(place) if isinstance(piece, Scattered) else [(place, piece)]
                views.append(_view(place))
                filled += len(piece)
        self.copy(copies)
        return views

    def copy(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second of each pair to the first; those from and to CUDA beside each other."""
        used = set()
        for target, source in copies:
            if target.device == source.device:  # in the host's memory; by NumPy: see `host.copy`
                np.copyto(target.numpy(), source.numpy())
                continue
            device = target.device if target.device.type == "cuda" else source.device
            if device.type != "cuda":
                target.copy_(source)
                continue
            used.add(stream := self._stream(device))
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in used:
            stream.synchronize()


def _each_block(size: int, move: Callable[[int], _T], most: int) -> list[_T]:
    """Do something with the start of every block, in several threads when there are many."""
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
    """Fill memory with what a part of a mapped file has at a place; None where it has to be read.

    Returns its checksum, where it is to be checked.
    """
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
            if first < last:  # by NumPy: see `host.copy`
                np.copyto(target[first - at : last - at], source[first:last])
    return total


def _read_into(descriptor: int, steps: Iterable[list[memoryview]], offset: int, path: Path, checked: bool) -> int:
    """Fill memory with what a file has at a place; returns its checksum, where it is to be checked."""
    total = 0
    for step in steps:
        if not disk.read(descriptor, step, offset):
            raise damaged(path)  # it has become shorter
        offset += sum(map(len, step))
        if checked:
            total = _sum(step, total)
    return total


def _settle(devices: Any) -> None:
    """Wait for what the devices are doing: other streams are going to read and write their memory."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of an open file do not say which one it is."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
