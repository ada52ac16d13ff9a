"""Which pieces of memory belong to a part of a file, and where they are cut."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


def within(ends: list[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Which pieces lie between two places of a file: the number of each, and its part from where to where."""
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
    """The parts of tensors whose places lie between two places of a file."""
    number = max(bisect.bisect_right(starts, start) - 1, 0)
    while number < len(places) and places[number][0] < end:
        offset, tensor = places[number]
        first, last = max(start, offset), min(end, offset + len(tensor))
        if first < last:
            yield first, tensor[first - offset : last - offset]
        number += 1


def filled_up(places: list[tuple[int, torch.Tensor]], buffer: memoryview, start: int, end: int) -> Iterator[memoryview]:
    """Memory for a part of a file: that of tensors where they have their places, of a buffer elsewhere.

    The buffer has room for all of the part, or for one step, and is then filled anew in each.
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
    """Pieces of memory in groups, each of so many bytes in all, the last one of the rest."""
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
    """The bytes of a tensor that is not contiguous, in their order; a part is brought together when it is written.

    It is cut between elements: in a file, blocks and tensors begin at multiples of their width.
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
        """What is to be copied, each with its place in this memory of as many bytes."""
        words, at = memory.view(self._words.dtype), 0
        for source in _between(self._words, self._first, self._last):
            yield words[at : at + source.numel()].view(source.shape), source
            at += source.numel()


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _between(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """What of a tensor lies between two of its elements, which are counted in their order: rows, and parts of rows."""
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
