"""The messages of fixed size that a gather starts with, as long as what they are expected to carry.

All ranks must send the same number of bytes before they know what the others bring. What they do know alike is what was
gathered until now: a message has room for what followed the last time after what was gathered last, so that those who
gather the same again and again need one collective for it, and those who gather a number send little more.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

_HEADER = 64  # numbers: how many tensors, their bytes, a check sum of their kinds, their lengths
_HEADER_BYTES = _HEADER * 8
# Every rank gets a message of each: so that these stay within a megabyte or a few, those of many ranks are smaller.
_ALL = 2**20
# To send less is no faster, and what was a little shorter before still fits.
_SMALLEST = 512
_UNKNOWN = 8192  # of what was never gathered before at this place, the header included
_MOST_FOLLOWED = 1024


class Message:
    """Room for what this rank tells, and for what it is told by all, this rank included.

    sent, received: for the collective, received by rank. address, places: where the tensors begin in each, behind the
    headers.
    """

    def __init__(self, room: int, ranks: int) -> None:
        self.room = room
        length = _HEADER_BYTES + room
        self.sent: torch.Tensor = torch.zeros(length, dtype=torch.uint8)
        self.received: list[torch.Tensor] = list(torch.empty(ranks, length, dtype=torch.uint8))
        self.head: int = self.sent.data_ptr()
        self.address: int = self.head + _HEADER_BYTES
        self.places: list[int] = [part.data_ptr() + _HEADER_BYTES for part in self.received]
        self.headers: list[memoryview] = [memoryview(part.numpy())[:_HEADER_BYTES] for part in self.received]  # type: ignore[arg-type]


class Messages:
    """The message of the next gather. All ranks have to tell it of the same gathers, in the same order."""

    def __init__(self, ranks: int) -> None:
        self.most_tensors: int = _HEADER - 3  # of which one message tells
        self._ranks = ranks
        self._largest = max(_SMALLEST, _round(_ALL // ranks + 1) // 2)
        self._made: dict[int, Message] = {}
        self._followed: dict[tuple[int, int, int], int] = {}
        self._last = (0, 0, 0)
        self._unknown = max(_SMALLEST, min(_UNKNOWN, self._largest) - _HEADER_BYTES)
        self.next: Message = self._of(self._unknown)

    def room_for(self, nbytes: int) -> int:
        """How much room a message has that is made for so many bytes. nbytes: -1 for what no message can carry."""
        room = _round(nbytes)
        return room if room <= self._largest else _SMALLEST

    def gathered(self, what: tuple[int, int, int]) -> None:
        """Expect what followed before. what: all that counts of what was just gathered, the room it needs at last."""
        if what == self._last and what[2] == self.next.room:
            return  # the same again, as expected
        if len(self._followed) >= _MOST_FOLLOWED:
            self._followed.clear()
        self._followed[self._last] = what[2]
        self._last = what
        self.next = self._of(self._followed.get(what, self._unknown))

    def _of(self, room: int) -> Message:
        if room not in self._made:
            self._made[room] = Message(room, self._ranks)
        return self._made[room]


# Not by communicator: a process that makes another one while the group lives on has to expect what the others expect.
_of_groups: WeakKeyDictionary[Any, Messages] = WeakKeyDictionary()


def messages_of(group: Any, ranks: int) -> Messages:
    """The messages of a process group."""
    if group not in _of_groups:
        _of_groups[group] = Messages(ranks)
    return _of_groups[group]


def _round(nbytes: int) -> int:
    """Up to a power of two: there are few messages then, and what grows a little still fits."""
    return max(_SMALLEST, 1 << max(0, nbytes - 1).bit_length())
