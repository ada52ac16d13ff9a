"""Streaming blocks of offloaded weights: copied in before use, dropped afterwards, only a few at a time."""

from __future__ import annotations

import copy
import threading
from typing import Any, NamedTuple, Protocol

import torch

from accelerate.devices import copies_behind
from accelerate.offload.access_order import END, Order
from accelerate.offload.slot import Slot

# A norm between two matrices must not hold up the next matrix: blocks smaller than this are not counted.
SMALL = 256 * 1024
# How many blocks to look ahead at most, small ones included.
_FARTHEST = 16


class Copy(Protocol):
    """Tensors on their way to the device."""

    def wait(self) -> list[torch.Tensor]:
        """The tensors, for use by what is launched from now on. May be called again."""

    def cancel(self) -> None:
        """The tensors will not be used."""


class Copier(Protocol):
    """Copies the tensors of slots to a device.

    lookahead: how many blocks may be on their way or waiting beyond the current one; 0 if that gains nothing.
    """

    lookahead: int

    def start(self, slots: list[Slot]) -> Copy:
        """Start copying what the slots' `take` returns."""

    def prepare(self, slots: list[Slot]) -> None:
        """Called before the first forward with what will be copied in every forward."""


class DirectCopier:
    """Copies when the tensors are asked for. On the CPU nothing is copied: weights are used where they are."""

    lookahead = 0

    def prepare(self, slots: list[Slot]) -> None:
        """Open the files, which are kept from then on."""
        for slot in slots:
            slot.source()

    def start(self, slots: list[Slot]) -> _Direct:
        return _Direct(slots)


class _Direct:
    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots

    def wait(self) -> list[torch.Tensor]:
        return [slot.value() for slot in self._slots]

    def cancel(self) -> None:
        """Nothing has begun."""


def copier_for(device: torch.device) -> Copier:
    """The best copier for a device."""
    if copies_behind(device):
        from accelerate.offload.cuda_copier import CudaCopier

        return CudaCopier(device)
    return DirectCopier()


class Block:
    """The tensors of a module that one hook loads. They are in the module between `install` and `remove`."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.nbytes: int = sum(slot.nbytes for slot in slots)
        # Types of devices, of which there is one at most, for which there is autocast.
        self.autocasts: set[str] = {
            slot.device.type for slot in slots if torch.amp.is_autocast_available(slot.device.type)
        }
        self.users = 0
        self._installed: list[tuple[Slot, torch.Tensor]] = []

    def missing(self) -> list[Slot]:
        """The slots that are empty. A slot that was filled with a real tensor is left alone."""
        return [slot for slot in self.slots if slot.is_empty()]

    def install(self, slots: list[Slot], tensors: list[torch.Tensor]) -> None:
        # Autocast keeps casts of what requires gradients until it ends: of all blocks, in the end. So nothing does,
        # where there are no gradients.
        gradients = torch.is_grad_enabled() or not any(map(torch.is_autocast_enabled, self.autocasts))
        self._installed = [(slot, slot.fill(tensor, gradients)) for slot, tensor in zip(slots, tensors, strict=True)]

    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for _, tensor in self._installed)

    def remove(self) -> None:
        for slot, tensor in self._installed:
            slot.clear(tensor)
        self._installed = []


class _Coming(NamedTuple):
    """A block on its way, or arrived."""

    slots: list[Slot]
    copy: Copy

    def is_outdated(self) -> bool:
        return any(map(Slot.is_outdated, self.slots))


class Streamer:
    """Copies blocks in when they are used, and ahead of that once their order is known.

    At most `copier.lookahead` blocks are on the device beyond those in use. If the order changes, blocks that were
    copied for nothing are dropped, and a block is copied when it is asked for. It looks ahead only between `begin` and
    `end`, so that nothing stays on the device afterwards.
    weights: what it streams; kept alive with it.
    """

    def __init__(self, copier: Copier, weights: Any = None) -> None:
        self.copier = copier
        self.weights: Any = weights
        self._guard = threading.Lock()  # a model may be called by several threads
        self._trains = False  # whether weights that require gradients have been there
        self._depth = 0  # how many forwards are going on, one inside of the other
        self._outermost = (0, 0)  # which, and in which thread
        self._orders: dict[int, Order[Block]] = {}
        self._order: Order[Block] = Order()
        self._in_use: dict[Block, _Coming] = {}
        self._coming: dict[Block, _Coming] = {}
        self._next: dict[Block, None] = {}
        self._lookahead = copier.lookahead
        self._known: dict[Block, None] = {}
        self._untold: list[Block] = []
        self._autocasts: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Streamer:
        """A copied model learns its own order, and gets its own copier, since streams cannot be copied."""
        memo[id(self)] = other = Streamer(self.copier)
        other.__setstate__(copy.deepcopy(self.__reduce__()[2], memo))
        return other

    def __reduce__(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return Streamer, (self.copier,), {"weights": self.weights, "blocks": list(self._known)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]
        for block in state["blocks"]:
            self.add(block)

    def add(self, block: Block) -> None:
        self._known[block] = None
        self._untold.append(block)
        self._autocasts |= block.autocasts

    def discard(self, block: Block) -> None:
        """Forget a block whose hook was removed."""
        with self._guard:
            if block in self._in_use:
                self._release(block)
            self._drop(block)
            self._known.pop(block, None)

    def prepare(self) -> None:
        """Prepare the blocks that were added since the last time."""
        if self._untold:
            self.copier.prepare([slot for block in self._untold if block in self._known for slot in block.slots])
            self._untold = []

    def begin(self, who: int = 0) -> None:
        """Called when the forward of a model, or of a part of it, begins. who: which one; each has its own order."""
        with self._guard:
            caller = who, threading.get_ident()
            if self._depth and caller != self._outermost:
                self._depth += 1
                return
            for block in list(self._in_use) if self._depth else ():
                self._release(block)  # left by a forward that ended with an exception and did not say so
            self._depth, self._outermost = 1, caller
            self.prepare()
            self._order = self._orders.setdefault(who, Order())
            self._look_ahead()

    def end(self) -> None:
        """Called when it ends, with or without an error. After the outermost one all memory is freed."""
        with self._guard:
            self._depth = max(self._depth - 1, 0)
            if self._depth:
                return
            if self._lookahead:
                self._order.use(END)
            self._next = {}
            self._drop_all()
            if self._trains and torch.is_grad_enabled() and any(map(torch.is_autocast_enabled, self._autocasts)):
                torch.clear_autocast_cache()  # it keeps casts of weights that have left: see `Block.install`

    def enter(self, block: Block) -> None:
        """Put the tensors of a block into their module."""
        with self._guard:
            if block.users:
                if self.copier.lookahead:
                    self._in_use[block].copy.wait()  # this caller may compute on another stream
                block.users += 1
                return
            coming = self._coming.pop(block, None)
            if coming is not None and coming.is_outdated():
                coming.copy.cancel()
                coming = None
            if coming is None:
                coming = self._start_now(block)
            block.install(coming.slots, coming.copy.wait())
            self._trains = self._trains or block.requires_grad()
            block.users = 1
            self._in_use[block] = coming
            if self._lookahead and self._depth:
                self._order.use(block)
                self._look_ahead()

    def leave(self, block: Block) -> None:
        """Remove the tensors of a block again."""
        with self._guard:
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
        room, in_use, small = self._lookahead, self._in_use, SMALL
        for block in self._order.ahead() if room else ():
            if block in chosen:
                continue
            if block.nbytes >= small and block not in in_use:
                if not room:
                    break
                room -= 1
            if len(chosen) == _FARTHEST:
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
