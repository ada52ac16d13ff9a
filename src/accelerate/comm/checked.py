"""Debug mode: compare what the ranks are about to do before they do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.comm.base import Communicator
from accelerate.comm.tree import leaves
from accelerate.errors import DistributedOperationException


def _as_it_is(shape: list[int]) -> Any:
    return shape


# What of a tensor's shape has to agree between the ranks, where it is not the whole of it.
_COMPARED: dict[str, Callable[[list[int]], Any]] = {
    "gather": lambda shape: shape[1:],
    "pad_across_processes": len,
}
_OBJECTS = frozenset({"gather_object", "broadcast_object_list"})


class Checked:
    """Any communicator, with a check of operation, shapes and dtypes on all ranks before each collective."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def verify(self, operation: str, data: Any) -> None:
        tensors = [] if operation in _OBJECTS else leaves(data)
        mine = (
            operation,
            [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors],
        )
        everyone = self._inner.gather_objects(mine)
        compared = [self._compared(*entry) for entry in everyone]
        if all(entry == compared[0] for entry in compared):
            return
        usual = max(compared, key=compared.count)
        differing = [str(rank) for rank, entry in enumerate(compared) if entry != usual]
        lines = [f"  rank {rank}: {name} of {_describe(shapes)}" for rank, (name, shapes) in enumerate(everyone)]
        raise DistributedOperationException(
            f"The ranks disagree about a collective; rank {', '.join(differing)} differs from the others:\n"
            + "\n".join(lines)
            + "\nMake every rank call the same operation with tensors of fitting shapes and dtypes"
            + " (`pad_across_processes` evens out lengths)."
        )

    @staticmethod
    def _compared(operation: str, shapes: list[tuple[list[int], str]]) -> Any:
        relevant = _COMPARED.get(operation, _as_it_is)
        return operation, [(relevant(shape), dtype) for shape, dtype in shapes]


def _describe(shapes: list[tuple[list[int], str]]) -> str:
    return ", ".join(f"{dtype}{shape}" for shape, dtype in shapes) or "no tensor"
