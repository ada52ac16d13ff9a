"""How processes talk. The base class is the plain case: one process, nobody to talk to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate.per_rank import PerRank


class Communicator:
    """Collectives on tensors and objects; nesting is dealt with in `comm.tree` and `comm.ops`."""

    rank: int = 0
    size: int = 1
    # Where large data travels best, if that is not the host: between GPUs, over their own links.
    fast_device: torch.device | None = None

    def verify(self, operation: str, data: Any) -> None:
        """Called before each collective on nested data; the checking communicator compares the ranks here."""

    def barrier(self) -> None:
        """Return when every process has called it."""

    def gather(self, tensors: list[torch.Tensor], keys: tuple[str | int, ...] = ()) -> list[torch.Tensor]:
        """For each tensor, those of all ranks concatenated along the first dimension.

        First dimensions may differ between ranks; where anything else differs every rank raises the same error.
        keys: by which the tensors are known to the script, and which are to be the same on all ranks.
        """
        return tensors

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce in place over all ranks with "sum", "min" or "max"."""
        return tensor

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors by their means over all ranks, in place."""
        for tensor in tensors:
            self.all_reduce(tensor).div_(self.size)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite `tensor` with the one of rank `source`."""
        return tensor

    def scatter(self, out: torch.Tensor, parts: list[torch.Tensor] | None, source: int = 0) -> None:
        """Fill `out` with this rank's part of what `source` hands out."""
        assert parts is not None
        out.copy_(parts[0])

    def gather_objects(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        return [value]

    def side_channel(self) -> tuple[Callable[[Any], list[Any]], Any]:
        """For a thread that works behind the training, whose messages must not meet those of the training:

        its `gather_objects`, and the process group it goes over (None where there is none). To be called on all ranks.
        """
        return self.gather_objects, None

    def broadcast_objects(self, values: list[Any], source: int = 0) -> None:
        """Overwrite the items of `values` with those of rank `source`."""


# At most one.
_current: PerRank[list[Communicator]] = PerRank(list)
_make: Callable[[], Communicator] | None = None


def current() -> Communicator:
    """The communicator of this rank; the first call sets the process up, as `PartialState()` does."""
    here = _current.get()
    if here:
        return here[0]
    return _make() if _make is not None else Communicator()


def existing() -> Communicator | None:
    """The communicator of this rank, if it has one already."""
    here = _current.get()
    return here[0] if here else None


def set_current(communicator: Communicator | None) -> None:
    _current.get()[:] = [] if communicator is None else [communicator]


def set_factory(make: Callable[[], Communicator]) -> None:
    """`accelerate.state` says here how a communicator comes to be, so that nothing here imports it."""
    global _make
    _make = make
