"""All modules of a model and all their tensors, listed in one walk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from accelerate.torch_internals.modules import buffers_of, parameters_of

Modules = list[tuple[str, nn.Module]]

# The tensors that a module itself has, by name.
Table = Callable[[nn.Module], Mapping[str, torch.Tensor | None]]

# First all parameters of a model are listed, then all buffers.
TENSORS: tuple[Table, ...] = (parameters_of, buffers_of)


def all_modules(model: nn.Module) -> Modules:
    """Return the modules of a model with their names; one with several names comes with each."""
    return list(model.named_modules(remove_duplicate=False))


def own_tensors(modules: Modules, table: Table) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    """Iterate over the modules that directly have tensors: the name of each, and its tensors with their full names.

    A tensor that has several names comes once, with the first.
    """
    seen: set[int] = set()
    for module_name, module in modules:
        found = []
        for name, tensor in table(module).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found.append((f"{module_name}.{name}" if module_name else name, tensor))
        if found:
            yield module_name, found


@contextmanager
def without_collecting_garbage() -> Iterator[None]:
    """Switch off garbage collection while very many lasting objects are created: it takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() == 0:
                # All that is new counts as old from now on, or it would be searched as soon as this is over.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
