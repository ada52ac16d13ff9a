"""Byte ranges of files: tensors stored in them, and which memory a range is read into or written from."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from accelerate.devices.staging import HostTensor, OpenFiles, Stored


class StoredTensor(Stored, Protocol):
    """A tensor that can be read in pieces. path: its file, or empty for a tensor in memory."""

    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def mapped(self) -> torch.Tensor:
        """The tensor on the CPU, without reading it if possible."""


class KeptFile:
    """The bytes of a file as it was when this object was created.

    They stay valid even if the file is deleted or replaced. The file is mapped and not kept open, since thousands of
    weights may each have their own file. Writing to the bytes changes this copy and not the file, so each model has its
    own.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            info = os.stat(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} with offloaded weights is not there: offload the model again.") from error
        self._identity = info.st_dev, info.st_ino  # not given to another file while this one is mapped
        mapped = torch.empty(0, dtype=torch.uint8, device="cpu")
        if info.st_size:
            storage: Any = torch.UntypedStorage.from_file(path, False, info.st_size)
            mapped.set_(storage)
        self.bytes: Any = mapped.numpy()

    def open(self) -> int | None:
        """A file descriptor, or None if the path now names another file."""
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except OSError:
            return None
        info = os.fstat(handle)
        if (info.st_dev, info.st_ino) == self._identity:
            return handle
        os.close(handle)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptFile:
        handle = self.open()
        if handle is None:
            return self
        os.close(handle)
        memo[id(self)] = made = KeptFile(self.path)
        return made

    def __reduce__(self) -> Any:
        """Another process opens the file by its path."""
        return _not_kept, ()


def _not_kept() -> None:
    return None


class FileRange(NamedTuple):
    """A tensor stored in a file. file: pins that very file; without it, the path is opened on each read."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: KeptFile | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def kept(self) -> FileRange:
        """The same range, pinned to the file that has the path now."""
        return self._replace(file=KeptFile(self.path))

    def mapped(self) -> torch.Tensor:
        """The tensor as a view of the mapped file: read when touched, never written back."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        raw, offset = (self.file or KeptFile(self.path)).bytes, self.offset
        if offset + self.nbytes > len(raw):
            raise OSError(f"{self.path} is too short to hold its offloaded weight: offload it again.")
        if offset % self.dtype.itemsize:
            raw, offset = raw[offset : offset + self.nbytes].copy(), 0
        return torch.frombuffer(raw, dtype=self.dtype, count=count, offset=offset).view(self.shape)

    def open(self) -> int | None:
        """A file descriptor, or None if the file was unlinked; it can still be read through its mapping."""
        return os.open(self.path, os.O_RDONLY) if self.file is None else self.file.open()

    def read(self, view: memoryview, start: int, files: OpenFiles) -> None:
        """Read its bytes from `start` on into memory."""
        handle = files.open(self)
        if handle is None:  # a file that has lost its name is still mapped
            HostTensor(self.mapped()).read(view, start, files)
        else:
            read_fully(handle, view, self.offset + start, self.path)


def read_fully(handle: int, address: memoryview, offset: int, path: str) -> None:
    """Fill `address` with the bytes of an open file from `offset` on."""
    done = os.preadv(handle, [address], offset)
    while done < len(address):
        count = os.preadv(handle, [address[done:]], offset + done)
        if count == 0:
            raise OSError(f"{path} ended while an offloaded weight was being read: offload it again.")
        done += count


def within(ends: list[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The pieces between two offsets of a file: the number of each, and the start and end of the range within it."""
    number = bisect.bisect_right(ends, start)
    while number < len(ends):
        first = ends[number - 1] if number else 0
        if first >= end:
            return
        if ends[number] > first:
            yield number, max(start - first, 0), min(end, ends[number]) - first
        number += 1


def overlapping(
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


def filled_up(places: list[tuple[int, torch.Tensor]], buffer: memoryview, start: int, end: int) -> Iterator[memoryview]:
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
        yield memoryview(tensor.numpy())  # type: ignore[arg-type]
        at = offset + len(tensor)
    yield from rest(at, end)


def in_steps(content: Iterable[Any], size: int) -> Iterator[list[memoryview]]:
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


class Scattered:
    """The bytes of a tensor that is not contiguous, in logical order. A slice is gathered only when it is written.

    It is sliced between elements: in a file, blocks and tensors begin at multiples of the element size.
    """

    def __init__(self, tensor: torch.Tensor, first: int = 0, last: int | None = None) -> None:
        self._words = tensor.view(_WORDS[tensor.element_size()])  # NumPy does not know all dtypes
        self._first, self._last = first, tensor.numel() if last is None else last
        self.device = tensor.device

    def __len__(self) -> int:
        return (self._last - self._first) * self._words.element_size()

    def __getitem__(self, part: slice) -> Scattered:
        width = self._words.element_size()
        return Scattered(self._words, self._first + part.start // width, self._first + part.stop // width)

    def onto(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The copies that gather it in `memory`: pairs of a target and a source."""
        words, at = memory.view(self._words.dtype), 0
        for source in _between(self._words, self._first, self._last):
            yield words[at : at + source.numel()].view(source.shape), source
            at += source.numel()


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _between(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """The elements from `first` to `last` of a tensor, in logical order, as rows and parts of rows."""
    if tensor.dim() == 1:
        yield tensor[first:last]
        return
    row = tensor.numel() // len(tensor)
    start, end = -(-first // row), last // row
    if start > end:  # in the midst of one
        yield from _between(tensor[end], first - end * row, last - end * row)
        return
    if first < start * row:
        yield from _between(tensor[start - 1], first - (start - 1) * row, row)
    if start < end:
        yield tensor[start:end]
    if end * row < last:
        yield from _between(tensor[end], 0, last - end * row)
