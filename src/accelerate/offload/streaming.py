"""Blocks of offloaded weights: brought in before they are used, let go afterwards, never more than a few at a time."""

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
        """The tensors, to be used by what is launched from now on; they may be asked for again."""

    def cancel(self) -> None:
        """They will not be used."""


class Copier(Protocol):
    """Brings the tensors of slots to a device.

    lookahead: how many blocks may be on their way or waiting beyond the current one; 0 where nothing is gained.
    """

    lookahead: int

    def start(self, slots: list[Slot]) -> Copy:
        """Begin to bring in what the slots' `take` gives."""

    def prepare(self, slots: list[Slot]) -> None:
        """Told before the first forward what will be copied again and again."""


class DirectCopier:
    """Copies when the tensors are asked for. On the CPU nothing is copied at all: weights are used where they lie."""

    lookahead = 0

    def prepare(self, slots: list[Slot]) -> None:
        """Find the files, which are kept from then on."""
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
    """What copies best to a device."""
    if copies_behind(device):
        from accelerate.offload.cuda_copier import CudaCopier

        return CudaCopier(device)
    return DirectCopier()


class Block:
    """What one hook brings in: the tensors of a module. They are in their module between `install` and `remove`."""

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
        """The slots that hold nothing: one that somebody has filled with a real tensor is left alone."""
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
    """Brings blocks in when they are used, and ahead of that as soon as their order is known.

    At most `copier.lookahead` blocks are there beyond those in use. Where the order changes, what was brought in for
    nothing is dropped, and a block comes when it is asked for. It looks ahead between `begin` and `end` only, so that
    nothing stays on the device behind them.
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
        """A copied model learns its own order; what a device has to copy with cannot be copied."""
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
        """Forget a block whose hook is taken off."""
        with self._guard:
            if block in self._in_use:
                self._release(block)
            self._drop(block)
            self._known.pop(block, None)

    def prepare(self) -> None:
        """Make ready for what has been added since the last time."""
        if self._untold:
            self.copier.prepare([slot for block in self._untold if block in self._known for slot in block.slots])
            self._untold = []

    def begin(self, who: int = 0) -> None:
        """The forward of a model, or of a part of it, begins. who: which; each has an order of its own."""
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
        """It is over, with or without success. After the outermost one all memory is given back."""
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
        """Put the tensors of a block into their modules."""
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
        """Take the tensors out again."""
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
