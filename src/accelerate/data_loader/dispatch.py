"""Handing out parts of a batch from rank 0: one message per batch and rank.

A message has a size that all ranks know beforehand: that of the previous batch. Its header says what is in it, and,
when the contents do not fit, how large the next message is in which they follow. The structure of a batch (its
nesting, shapes, dtypes, and everything that is no tensor) is sent only when it has changed.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch

from accelerate.comm import Communicator
from accelerate.comm.tree import get_data_structure, is_tensor_information, leaves, recursively_apply

_ALIGNMENT = 64
_HEADER_BYTES = 64
_FIRST_SIZE = 4096


class Part(NamedTuple):
    """What one rank gets: its piece of the batch, how many samples of it are no repeats, and whether it is the last."""

    batch: Any
    real_samples: int
    is_last: bool
    total_samples: int


class _Header(NamedTuple):
    complete: int  # whether the contents are in this message
    size: int  # of the next message
    structure: int  # bytes of pickled structure, 0 when it is that of the previous batch
    real_samples: int
    is_last: int
    total_samples: int
    finished: int  # nothing comes after this


class Handout:
    """One epoch's messages, on both sides of the wire."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._size = _FIRST_SIZE
        self._structures: dict[int, Any] = {}
        self._received: Any = None

    def finish(self) -> None:
        """Rank 0: tell everyone that there is no batch at all."""
        header = _Header(1, self._size, 0, 0, 1, 0, 1)
        self._scatter([_message(header, b"", [], self._size) for _ in range(self._communicator.size)])

    def send(self, parts: list[Part]) -> None:
        """Rank 0: give each rank its part."""
        structures, needed = [], _HEADER_BYTES
        for rank, part in enumerate(parts):
            structure = get_data_structure(part.batch)
            unchanged = rank in self._structures and self._structures[rank] == structure
            self._structures[rank] = structure
            structures.append(b"" if unchanged else pickle.dumps(structure))
            contents = sum(_aligned(tensor.nbytes) for tensor in leaves(part.batch))
            needed = max(needed, _HEADER_BYTES + _aligned(len(structures[-1])) + contents)
        fits = needed <= self._size
        # A much smaller batch makes the next messages small again.
        following = self._size if fits and needed > self._size // 2 else _aligned(needed)
        size = self._size
        if not fits:
            notice = _Header(0, needed, 0, 0, 0, 0, 0)
            self._scatter([_message(notice, b"", [], size) for _ in parts])
            size = needed
        messages = []
        for rank, (part, structure_bytes) in enumerate(zip(parts, structures, strict=True)):
            header = _Header(1, following, len(structure_bytes), part.real_samples, part.is_last, part.total_samples, 0)
            # Rank 0 keeps its own part: no need to copy it into a message to itself.
            tensors = [] if rank == 0 else [tensor.detach() for tensor in leaves(part.batch)]
            messages.append(_message(header, structure_bytes if rank else b"", tensors, size))
        self._size = size
        self._scatter(messages)
        self._size = following

    def receive(self) -> Part | None:
        """The other ranks: the next part, or None when there is no batch."""
        message = self._receive()
        header = _Header(*message[:56].view(torch.int64).tolist())
        if not header.complete:
            self._size = header.size
            message = self._receive()
            header = _Header(*message[:56].view(torch.int64).tolist())
        self._size = header.size
        if header.finished:
            return None
        offset = _HEADER_BYTES
        if header.structure:
            # The structure of a batch comes from rank 0 of this very job, not from a file.
            self._received = pickle.loads(message[offset : offset + header.structure].numpy().tobytes())
            offset += _aligned(header.structure)

        def cut(info: Any) -> torch.Tensor:
            nonlocal offset
            count = info.shape.numel() * info.dtype.itemsize
            tensor = message[offset : offset + count].view(info.dtype).view(info.shape)
            offset += _aligned(count)
            return tensor

        batch = recursively_apply(cut, self._received, test_type=is_tensor_information)
        return Part(batch, header.real_samples, bool(header.is_last), header.total_samples)

    def _scatter(self, messages: list[torch.Tensor]) -> None:
        self._communicator.scatter(torch.empty(self._size, dtype=torch.uint8), messages)

    def _receive(self) -> torch.Tensor:
        # A new buffer each time: the tensors of a batch are views of it.
        message = torch.empty(self._size, dtype=torch.uint8)
        self._communicator.scatter(message, None)
        return message


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _message(header: _Header, structure: bytes, tensors: list[torch.Tensor], size: int) -> torch.Tensor:
    message = torch.empty(size, dtype=torch.uint8)
    message[:56].view(torch.int64).copy_(torch.tensor(header))
    offset = _HEADER_BYTES
    if structure:
        message[offset : offset + len(structure)] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
        offset += _aligned(len(structure))
    for tensor in tensors:
        count = tensor.nbytes
        if count:
            message[offset : offset + count].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        offset += _aligned(count)
    return message
