"""Handing out parts of a batch from rank 0: one message per batch and rank.

A message has a size that all ranks know beforehand: that of the previous batch. Its header says what is in it, and,
when the contents do not fit, how large the next message is in which they follow. The structure of a batch (its
nesting, shapes, dtypes, and everything that is no tensor) is sent only when it has changed. Where the devices have
links of their own, large contents follow there, in a second message.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from accelerate.comm import Communicator
from accelerate.comm.tree import get_data_structure, is_tensor_information, leaves, recursively_apply

_ALIGNMENT = 64
_HEADER_BYTES = 64
_FIRST_SIZE = 4096
_LARGE = 1 << 18  # bytes from which a second message, on the device, is worth it


class RankBatch(NamedTuple):
    """What one rank gets: its piece of the batch, how many samples of it are no repeats and how many it has (None
    when none is a repeat), whether it is the last, and how many samples all pieces have without repeats."""

    batch: Any
    counts: tuple[int, int] | None
    is_last: bool
    total_samples: int


class _Header(NamedTuple):
    kind: int
    size: int  # of the next message
    structure: int  # bytes of pickled structure, 0 when it is that of the previous batch; or of the error text
    real_samples: int = -1
    samples: int = -1
    is_last: int = 0
    total_samples: int = -1
    apart: int = 0  # bytes of the contents, where these follow on the device


_BATCH, _LARGER, _FINISHED, _FAILED, _LEFT_OUT = range(5)


_FIELD_BYTES = 8 * len(_Header._fields)


class Handout:
    """One epoch's messages, on both sides of the wire."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._size = _FIRST_SIZE
        self._device = communicator.fast_device
        self._structures: dict[int, bytes] = {}
        self._received: Any = None

    def finish(self) -> None:
        """Rank 0: tell everyone that there is no batch at all."""
        self._scatter_to_all(_Header(_FINISHED, self._size, 0))

    def left_out(self) -> None:
        """Rank 0: tell everyone that a step was read which nobody gets, so that they do not wait for too long."""
        self._scatter_to_all(_Header(_LEFT_OUT, self._size, 0))

    @contextlib.contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Rank 0: an error inside reaches the others too, who are waiting for a batch and would do so forever."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()
            self._make_room(_HEADER_BYTES + len(text))
            self._scatter_to_all(_Header(_FAILED, self._size, len(text)), text)
            raise

    def describe(self, parts: list[RankBatch]) -> list[bytes]:
        """Rank 0: the structures of its parts; rank 0 keeps its own, so there is none for it."""
        return [b"", *(pickle.dumps(get_data_structure(part.batch)) for part in parts[1:])]

    def send(self, parts: list[RankBatch], described: list[bytes]) -> None:
        """Rank 0: give each rank its part."""
        structures, needed = [b""], _HEADER_BYTES
        apart = self._apart(parts)
        for rank, part in enumerate(parts[1:], start=1):
            # Compared as bytes: numbers may be equal (1, 1.0, True) and arrays cannot be compared.
            unchanged = self._structures.get(rank) == described[rank]
            self._structures[rank] = described[rank]
            structures.append(b"" if unchanged else described[rank])
            contents = 0 if apart else _content_bytes(part)
            needed = max(needed, _HEADER_BYTES + _aligned(len(structures[-1])) + contents)
        # A much smaller batch makes the next messages small again.
        following = self._size if self._size // 2 < needed <= self._size else _aligned(needed)
        self._make_room(needed)
        messages = []
        for rank, (part, structure) in enumerate(zip(parts, structures, strict=True)):
            real, samples = part.counts or (-1, -1)
            header = _Header(_BATCH, following, len(structure), real, samples, part.is_last, part.total_samples, apart)
            messages.append(_message(header, structure, [] if apart else _contents(rank, part), self._size))
        self._scatter(messages)
        self._size = following
        if apart:
            packed = [_packed(torch.empty(apart, dtype=torch.uint8), 0, _contents(*each)) for each in enumerate(parts)]
            placed = [message.to(self._device) for message in packed]
            self._communicator.scatter(torch.empty_like(placed[0]), placed)

    def receive(self) -> RankBatch | None:
        """The other ranks: the next part, or None when there is no batch."""
        header, message = self._receive()
        while header.kind in (_LARGER, _LEFT_OUT):
            self._size = header.size
            header, message = self._receive()
        self._size = header.size
        if header.kind == _FINISHED:
            return None
        offset = _HEADER_BYTES
        if header.kind == _FAILED:
            text = message[offset : offset + header.structure].numpy().tobytes().decode()
            raise RuntimeError(f"Rank 0 could not read the next batch for all ranks ({text}): see its traceback.")
        if header.structure:
            # The structure of a batch comes from rank 0 of this very job, not from a file.
            self._received = pickle.loads(message[offset : offset + header.structure].numpy().tobytes())
            offset += _aligned(header.structure)
        if header.apart:
            message, offset = torch.empty(header.apart, dtype=torch.uint8, device=self._device), 0
            self._communicator.scatter(message, None)

        def cut(info: Any) -> torch.Tensor:
            nonlocal offset
            count = info.shape.numel() * info.dtype.itemsize
            tensor = message[offset : offset + count].view(info.dtype).view(info.shape)
            offset += _aligned(count)
            return tensor

        batch = recursively_apply(cut, self._received, test_type=is_tensor_information)
        counts = None if header.samples < 0 else (header.real_samples, header.samples)
        return RankBatch(batch, counts, bool(header.is_last), header.total_samples)

    def _apart(self, parts: list[RankBatch]) -> int:
        """How many bytes the contents of the largest part have, if they are to follow on the device, or 0."""
        if self._device is None:
            return 0
        largest = max(_content_bytes(part) for part in parts)
        return largest if largest >= _LARGE else 0

    def _make_room(self, needed: int) -> None:
        """Rank 0: let the next message be `needed` bytes long, if it would be too small."""
        if needed > self._size:
            self._scatter_to_all(_Header(_LARGER, needed, 0))
            self._size = needed

    def _scatter_to_all(self, header: _Header, text: bytes = b"") -> None:
        self._scatter([_message(header, text, [], self._size)] * self._communicator.size)

    def _scatter(self, messages: list[torch.Tensor]) -> None:
        self._communicator.scatter(torch.empty(self._size, dtype=torch.uint8), messages)

    def _receive(self) -> tuple[_Header, torch.Tensor]:
        # A new buffer each time: the tensors of a batch are views of it.
        message = torch.empty(self._size, dtype=torch.uint8)
        self._communicator.scatter(message, None)
        return _Header(*message[:_FIELD_BYTES].view(torch.int64).tolist()), message


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _message(header: _Header, structure: bytes, tensors: list[torch.Tensor], size: int) -> torch.Tensor:
    message = torch.empty(size, dtype=torch.uint8)
    message[:_FIELD_BYTES].view(torch.int64).copy_(torch.tensor(header))
    offset = _HEADER_BYTES
    if structure:
        message[offset : offset + len(structure)] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
        offset += _aligned(len(structure))
    return _packed(message, offset, tensors)


def _content_bytes(part: RankBatch) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in leaves(part.batch))


def _contents(rank: int, part: RankBatch) -> list[torch.Tensor]:
    """What a message to a rank has to carry; rank 0 keeps its own part."""
    return [] if rank == 0 else [tensor.detach() for tensor in leaves(part.batch)]


def _packed(message: torch.Tensor, offset: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    for tensor in tensors:
        count = tensor.nbytes
        if count:
            message[offset : offset + count].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        offset += _aligned(count)
    return message
