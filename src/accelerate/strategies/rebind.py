"""Optimizers that were made before their model was spread: they get its new parameters, and keep all they had."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from accelerate.parallel.shards import spread_as


class Moved:
    """Which parameter became which. Holds on to neither."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def note(self, old: torch.Tensor, new: torch.Tensor) -> None:
        if old is not new:
            self._new[id(old)] = weakref.ref(old), weakref.ref(new)

    def new(self, parameter: torch.Tensor) -> torch.Tensor:
        old, new = self._new.get(id(parameter), (None, None))
        if old is None or new is None or old() is not parameter:  # the number may be that of a later object
            return parameter
        found = new()
        return parameter if found is None else found

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the new parameters, in their groups, with the state that it had for the old ones."""
        for group in optimizer.param_groups:
            group["params"][:] = [self.new(parameter) for parameter in group["params"]]
        for old in list(optimizer.state):
            new = self.new(old) if isinstance(old, torch.Tensor) else old
            if new is not old:
                optimizer.state[new] = {name: _kept(value, new) for name, value in optimizer.state.pop(old).items()}


def _kept(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
        return spread_as(value, parameter)
    return value
