"""Debug mode: compare what the ranks are about to do before they do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.comm.base import Communicator
from accelerate.comm.tree import dtype_name, keys_of, leaves
from accelerate.diagnosis.place import line_of_script
from accelerate.errors import DistributedOperationException

# What of a tensor's shape has to agree between the ranks, where it is not the whole of it.
_COMPARED: dict[str, Callable[[list[int]], Any]] = {
    "gather": lambda shape: shape[1:],
    "pad_across_processes": len,
}
_OBJECTS = frozenset({"gather_object", "broadcast_object_list"})


class Checked:
    """Any communicator, with a check of operation, line and tensors on all ranks before each collective."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def barrier(self) -> None:
        self.verify("wait_for_everyone", None)
        self._inner.barrier()

    def verify(self, operation: str, data: Any) -> None:
        tensors = [] if operation in _OBJECTS else leaves(data)
        mine = (
            operation,
            line_of_script(),
            [(list(tensor.shape), dtype_name(tensor)) for tensor in tensors],
            () if operation in _OBJECTS else keys_of(data),
        )
        everyone = self._inner.gather_objects(mine)
        compared = [self._compared(*entry) for entry in everyone]
        if all(entry == compared[0] for entry in compared):
            return
        usual = max(compared, key=compared.count)
        differing = [str(rank) for rank, entry in enumerate(compared) if entry != usual]
        lines = [
            f"  rank {rank}: {name}{_describe(shapes, keys)} ({line})"
            for rank, (name, line, shapes, keys) in enumerate(everyone)
        ]
        raise DistributedOperationException(
            f"The ranks disagree about a collective; rank {', '.join(differing)} differs from the others:\n"
            + "\n".join(lines)
            + "\nMake every rank call the same operation, on the same line, with tensors of matching shapes and dtypes"
            + " under the same keys (`pad_across_processes` makes lengths equal); code under `if is_main_process` runs"
            + " on one rank only."
        )

    @staticmethod
    def _compared(operation: str, line: str, shapes: list[tuple[list[int], str]], keys: tuple[str | int, ...]) -> Any:
        relevant = _COMPARED.get(operation, list)
        return operation, line, [(relevant(shape), dtype) for shape, dtype in shapes], keys


def _describe(shapes: list[tuple[list[int], str]], keys: tuple[str | int, ...]) -> str:
    of = " of " + ", ".join(f"{dtype}{shape}" for shape, dtype in shapes) if shapes else ""
    return of + (f" with the keys {', '.join(map(str, keys))}" if keys else "")
