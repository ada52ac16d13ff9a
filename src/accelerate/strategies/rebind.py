"""Optimizers that were made before their model was spread: they get its new parameters, and keep all they had."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerate.parallel.shards import spread_as
from accelerate.torch_internals.modules import parameters_of


class Moved:
    """Where the parameter is that came in place of another. Holds on to neither."""

    def __init__(self) -> None:
        # By the module that has it: torch moves no parameter that somebody has a weak reference to.
        self._new: dict[int, tuple[weakref.ref[Any], weakref.ref[nn.Module], str]] = {}

    def note(self, old: torch.Tensor, module: nn.Module, name: str) -> None:
        if old is not parameters_of(module)[name]:
            self._new[id(old)] = weakref.ref(old), weakref.ref(module), name

    def new(self, parameter: torch.Tensor) -> torch.Tensor:
        old, owner, name = self._new.get(id(parameter), (None, None, ""))
        if old is None or owner is None or old() is not parameter:  # the number may be that of a later object
            return parameter
        module = owner()
        found = None if module is None else parameters_of(module).get(name)
        return parameter if found is None else found

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the new parameters, in their groups, with the state that it had for the old ones."""
        rebind(optimizer, self.new)


def rebind(optimizer: torch.optim.Optimizer, new_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give an optimizer other parameters, in the groups of the old ones, and with their state."""
    for group in optimizer.param_groups:
        group["params"][:] = [new_of(parameter) for parameter in group["params"]]
    for old in list(optimizer.state):
        new = new_of(old) if isinstance(old, torch.Tensor) else old
        if new is not old:
            optimizer.state[new] = {name: _kept(value, new) for name, value in optimizer.state.pop(old).items()}


def _kept(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
        return spread_as(value, parameter)
    return value
