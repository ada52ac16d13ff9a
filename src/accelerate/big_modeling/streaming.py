"""Blocks of offloaded weights: brought in before they are used, let go afterwards, never more than a few at a time."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

import torch

from accelerate.big_modeling.order import END, Order
from accelerate.big_modeling.placeholder import Slot

# A norm between two matrices must not hold up the next matrix: blocks smaller than this are not counted.
SMALL = 256 * 1024
# How many blocks to look ahead at most, small ones included.
_FARTHEST = 16


class Copy(Protocol):
    """Tensors on their way to the device."""

    def wait(self) -> list[torch.Tensor]:
        """The tensors, to be used by what is launched from now on."""

    def cancel(self) -> None:
        """They will not be used."""


class Copier(Protocol):
    """Brings the tensors of slots to a device.

    lookahead: how many blocks may be on their way or waiting beyond the current one; 0 where nothing is gained.
    """

    lookahead: int

    def start(self, slots: list[Slot]) -> Copy:
        """Begin to bring the tensors in."""

    def prepare(self, slots: list[Slot]) -> None:
        """Told before the first forward what will be copied again and again."""


class Block:
    """What one hook brings in: the tensors of a module. They are in their module between `install` and `remove`."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.nbytes = sum(slot.nbytes for slot in slots)
        self.users = 0
        self._installed: list[tuple[Slot, torch.Tensor]] = []

    def missing(self) -> list[Slot]:
        """The slots that hold nothing: one that somebody has filled with a real tensor is left alone."""
        return [slot for slot in self.slots if slot.is_empty()]

    def install(self, slots: list[Slot], tensors: list[torch.Tensor]) -> None:
        self._installed = [(slot, slot.fill(tensor)) for slot, tensor in zip(slots, tensors, strict=True)]

    def remove(self) -> None:
        for slot, tensor in self._installed:
            slot.clear(tensor)
        self._installed = []


class _Coming(NamedTuple):
    """A block on its way, or arrived."""

    slots: list[Slot]
    copy: Copy


class Streamer:
    """Brings blocks in when they are used, and ahead of that as soon as their order is known.

    At most `copier.lookahead` blocks are there beyond those in use. Where the order changes, what was brought in for
    nothing is dropped, and a block comes when it is asked for.
    weights: what it streams; kept alive with it.
    """

    def __init__(self, copier: Copier, weights: Any = None) -> None:
        self.copier = copier
        self.weights = weights
        self._order: Order[Block] = Order()
        self._in_use: dict[Block, _Coming] = {}
        self._coming: dict[Block, _Coming] = {}
        self._next: dict[Block, None] = {}
        self._lookahead = copier.lookahead
        self._known: dict[Block, None] = {}
        self._untold: list[Block] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Streamer:
        """A copied model learns its own order; what a device has to copy with cannot be copied."""
        other = Streamer(self.copier, copy.deepcopy(self.weights, memo))
        for block in copy.deepcopy(list(self._known), memo):
            other.add(block)
        return other

    def add(self, block: Block) -> None:
        self._known[block] = None
        self._untold.append(block)

    def discard(self, block: Block) -> None:
        """Forget a block whose hook is taken off."""
        if block in self._in_use:
            self._release(block)
        self._drop(block)
        self._known.pop(block, None)

    def prepare(self) -> None:
        """Make ready for what has been added since the last time."""
        if self._untold:
            self.copier.prepare([slot for block in self._untold if block in self._known for slot in block.slots])
            self._untold = []

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self.prepare()
        for block in list(self._in_use):  # left by a forward that an exception ended
            self._release(block)
        self._look_ahead()

    def end(self) -> None:
        """The forward is over: give all memory back."""
        if self._lookahead:
            self._order.use(END)
        self._drop_all()

    def enter(self, block: Block) -> None:
        """Put the tensors of a block into their modules."""
        if block.users:
            block.users += 1
            return
        coming = self._coming.pop(block, None)
        if coming is None:
            coming = self._start_now(block)
        block.install(coming.slots, coming.copy.wait())
        block.users = 1
        self._in_use[block] = coming
        if self._lookahead:
            self._order.use(block)
            self._look_ahead()

    def leave(self, block: Block) -> None:
        """Take the tensors out again."""
        if block.users > 1:
            block.users -= 1
        elif block.users == 1:
            copied = self._release(block)
            if copied is not None and block in self._next:
                self._coming[block] = copied  # it is about to be used again

    def _release(self, block: Block) -> _Coming | None:
        block.users = 0
        block.remove()
        return self._in_use.pop(block, None)

    def _look_ahead(self) -> None:
        """Start the copies of the next blocks, and drop those that turned out not to be next."""
        self._next = self._choose()
        for block in [block for block in self._coming if block not in self._next]:
            self._drop(block)
        for block in self._next:
            if block not in self._in_use and block not in self._coming:
                try:
                    self._coming[block] = self._start(block)
                except torch.OutOfMemoryError:
                    self._lookahead -= 1  # there is no room for so many
                    break

    def _choose(self) -> dict[Block, None]:
        chosen: dict[Block, None] = {}
        counted = 0
        for block in self._order.ahead() if self._lookahead else ():
            if block in chosen:
                continue
            counted += block.nbytes >= SMALL and block not in self._in_use
            if counted > self._lookahead or len(chosen) == _FARTHEST:
                break
            chosen[block] = None
        return chosen

    def _start(self, block: Block) -> _Coming:
        slots = block.missing()
        return _Coming(slots, self.copier.start(slots))

    def _start_now(self, block: Block) -> _Coming:
        try:
            return self._start(block)
        except torch.OutOfMemoryError:
            if not self._coming:
                raise
            self._drop_all()
            return self._start(block)

    def _drop_all(self) -> None:
        for block in list(self._coming):
            self._drop(block)

    def _drop(self, block: Block) -> None:
        coming = self._coming.pop(block, None)
        if coming is not None:
            coming.copy.cancel()
