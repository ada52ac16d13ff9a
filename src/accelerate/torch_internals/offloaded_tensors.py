"""Tensors that stand in a module for values that lie elsewhere, and casts of the modules that have such tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn


def describing_functions() -> set[Any]:
    """Functions that torch itself asks about a tensor, and that can be answered without its value.

    One that is gone is not asked.
    """
    named = (
        (torch, "_has_compatible_shallow_copy_type"),
        (torch.Tensor, "_is_view"),
        (torch.Tensor, "_is_zerotensor"),
    )
    return {getattr(owner, name) for owner, name in named if hasattr(owner, name)}


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to; None where nobody counts, as with tensors of inference mode.

    Without `_version` weights that are written to while they are on their way to the device arrive as they were, and
    small ones are copied to the device one by one.
    """
    try:
        return tensor._version
    except (AttributeError, RuntimeError):
        return None


class BecomesParameter:
    """A class of tensors that hears when `nn.Parameter(tensor)` has made a parameter of one.

    torch marks it with `_is_param`. Without that, `nn.Parameter(weight)` of an offloaded weight is another stand-in
    instead of a parameter that can be trained.
    """

    def became_parameter(self) -> None:
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_is_param":
            self.became_parameter()


Apply = Callable[..., nn.Module]


def replace_apply(module: nn.Module, apply: Apply) -> None:
    """Have `to`, `cuda`, `half` and their likes, of a module and of those around it, call another function.

    Without `nn.Module._apply` an offloaded model is not kept from being moved: all of its weights are brought in.
    """
    if hasattr(nn.Module, "_apply"):
        cast(Any, module)._apply = apply


def restore_apply(module: nn.Module) -> None:
    """Undo `replace_apply`."""
    module.__dict__.pop("_apply", None)


def apply_of_class(module: nn.Module, function: Callable[[torch.Tensor], Any], *args: Any, **kwargs: Any) -> nn.Module:
    """What `replace_apply` has replaced."""
    applied: nn.Module = type(module)._apply(module, function, *args, **kwargs)
    return applied
