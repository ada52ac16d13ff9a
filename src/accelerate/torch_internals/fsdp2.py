"""fully_shard: the gradients that wait, whole, beside the parameters until they are exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accelerate.torch_internals.missing import gone


class WaitingGradients:
    """The gradients of one model that wait, as a whole, for the exchange at the end of a window.

    Without torch's groups of parameters they cannot be found: to save or to load inside a window is refused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sharded: dict[int, Any] = {}
        self._missing: str | None = None
        try:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    self._sharded |= {id(sharded.sharded_param): sharded for sharded in _parameters_of(module)}
        except AttributeError as error:
            self._missing = str(error.name)

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        sharded = self._find(parameter)
        if sharded is None:
            return None  # not of this model
        gradient: torch.Tensor | None = sharded.unsharded_accumulated_grad
        unsharded = getattr(sharded, "_unsharded_param", None)
        return unsharded.grad if gradient is None and unsharded is not None else gradient

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is None and self._missing is not None:
            return  # nothing is put there, since nothing was saved
        sharded = self._find(parameter)
        if sharded is not None:
            sharded.unsharded_accumulated_grad = gradient
            unsharded = getattr(sharded, "_unsharded_param", None)
            if unsharded is not None:  # it has been used
                unsharded.grad = None

    def _find(self, parameter: torch.Tensor) -> Any:
        if self._missing is not None:
            raise gone(
                self._missing,
                "a checkpoint inside an accumulation window, or one with num_items, under FSDP",
                "save after `optimizer.step()`, and give mean losses",
            )
        return self._sharded.get(id(parameter))


def _parameters_of(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.10 there may be several
    for group in [state._fsdp_param_group] if groups is None else groups:
        yield from group.fsdp_params if group is not None else ()
