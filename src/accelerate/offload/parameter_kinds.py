"""Recreating parameters of any class with other data: plain ones, subclasses, and those of bitsandbytes.

bitsandbytes quantizes when a parameter is moved from the CPU to where it stays, which may be the CPU as well.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from accelerate.torch_internals.modules import parameters_of

# The classes of tensors that are just their values.
PLAIN = (torch.Tensor, nn.Parameter)

# By name, so that bitsandbytes need not be there.
_EIGHT_BIT = "Int8Params"
_FOUR_BIT = ("Params4bit", "FP4Params")


def is_quantized(tensor: torch.Tensor) -> bool:
    """Tell whether a parameter is one of bitsandbytes, already quantized or to be."""
    return type(tensor).__name__ in (_EIGHT_BIT, *_FOUR_BIT)


def is_packed(tensor: torch.Tensor) -> bool:
    """Tell whether a parameter may have another shape than its layer says, because several numbers share a byte."""
    return type(tensor).__name__ in _FOUR_BIT


def has_parts(kind: type[torch.Tensor]) -> bool:
    """Tell whether tensors of a class are made of other tensors."""
    return hasattr(kind, "__tensor_flatten__")


def like(parameter: torch.Tensor, data: torch.Tensor, **attributes: Any) -> nn.Parameter:
    """Return a parameter with the same class and attributes, but other data.

    attributes: those to change.
    """
    return of_kind(type(parameter), data, parameter.requires_grad, {**parameter.__dict__, **attributes})


def of_kind(
    kind: type[torch.Tensor], data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]
) -> nn.Parameter:
    """Return a parameter of a class, which may be a tensor subclass that was turned into a parameter."""
    if kind is not nn.Parameter and issubclass(kind, nn.Parameter):
        accepted = _arguments(kind)
        known = {name: value for name, value in attributes.items() if name in accepted}
        made: nn.Parameter = kind(data, **{**known, "requires_grad": requires_grad})
    else:
        made = nn.Parameter(data, requires_grad=requires_grad)
    made.__dict__.update(attributes)
    return made


@functools.cache
def _arguments(kind: type[nn.Parameter]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.__new__).parameters)


def place_quantized(
    holder: nn.Module,
    name: str,
    value: torch.Tensor | None,
    device: torch.device,
    statistics: torch.Tensor | None,
) -> None:
    """Put a parameter of bitsandbytes on a device, quantizing it there if it is not quantized yet.

    statistics: the scales of an 8-bit value.
    """
    parameters = parameters_of(holder)
    old: Any = parameters[name]
    place = _place_eight_bit if type(old).__name__ == _EIGHT_BIT else _place_four_bit
    parameters[name] = place(holder, old, value, device, statistics)


def _place_eight_bit(
    holder: nn.Module, old: Any, value: torch.Tensor | None, device: torch.device, statistics: torch.Tensor | None
) -> Any:
    if device.type == "meta":
        # The layer took weight and scales over on its first call.
        state = getattr(holder, "state", None)
        if state is not None:
            state.CB = state.SCB = None
        return like(old, old.data.to(device), CB=None, SCB=None)
    if value is None:
        moved = old.to(device)
    elif value.dtype == torch.int8:
        data = value.to(device)
        moved = like(old, data, CB=data, SCB=None)
    else:
        moved = like(old, value.to("cpu"), CB=None, SCB=None).to(device)
    if statistics is not None:
        moved.SCB = statistics.to(device)
    return moved


def _place_four_bit(
    holder: nn.Module, old: Any, value: torch.Tensor | None, device: torch.device, statistics: torch.Tensor | None
) -> Any:
    if device.type == "meta":
        return like(old, old.data.to(device))
    if value is None:
        return old.to(device)
    if old.bnb_quantized and value.dtype == old.quant_storage:
        return like(old, value.to("cpu")).to(device)
    return like(old, value.to("cpu"), bnb_quantized=False, quant_state=None, module=holder).to(device)
