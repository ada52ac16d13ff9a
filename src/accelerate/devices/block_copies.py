"""Copying blocks of tensors to the host, by threads that each have a buffer and a stream of their own."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import numpy as np
import torch

from accelerate.devices import copies_behind


class BlockCopies:
    """The buffer and the stream of each thread that copies blocks to the host.

    devices: those that the blocks come from. They are waited for: other streams are going to read their memory.
    """

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._own = threading.local()
        self._pinned = any(map(copies_behind, devices))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def buffer(self, size: int) -> torch.Tensor:
        """The buffer of this thread, reused each time."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        buffer: torch.Tensor = self._own.buffer
        return buffer

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        streams: dict[torch.device, torch.cuda.Stream] = self._own.__dict__.setdefault("streams", {})
        if device not in streams:
            torch.cuda.set_device(device)  # of this thread, which would else begin with the first one
            streams[device] = torch.cuda.Stream(device)
        return streams[device]

    def copy(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second of each pair to the first, which is on the host. Copies from CUDA run concurrently."""
        used = set()
        for target, source in copies:
            if source.device.type == "cpu":  # by NumPy, since torch would have threads of its own for each
                np.copyto(target.numpy(), source.numpy())
            elif source.device.type != "cuda":
                target.copy_(source)
            else:
                used.add(stream := self._stream(source.device))
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream in used:
            stream.synchronize()


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
        for source in rows_between(self._words, self._first, self._last):
            yield words[at : at + source.numel()].view(source.shape), source
            at += source.numel()


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rows_between(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """The elements from `first` to `last` of a tensor, in logical order, as rows and parts of rows."""
    if tensor.dim() == 1:
        yield tensor[first:last]
        return
    row = tensor.numel() // len(tensor)
    start, end = -(-first // row), last // row
    if start > end:  # in the midst of one
        yield from rows_between(tensor[end], first - end * row, last - end * row)
        return
    if first < start * row:
        yield from rows_between(tensor[start - 1], first - (start - 1) * row, row)
    if start < end:
        yield tensor[start:end]
    if end * row < last:
        yield from rows_between(tensor[end], 0, last - end * row)
