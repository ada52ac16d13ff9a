"""Modules that are born without weights, or on a device."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.parameters import like
from accelerate.config.environment import parse_flag_from_env


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Builds models without memory for their parameters, however big they are.

        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])

    Ties between parameters are kept. include_buffers: do the same with buffers, which by default keep their values
    (`ACCELERATE_INIT_INCLUDE_BUFFERS` sets the default).
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | int | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Builds models whose parameters (with `include_buffers` also the buffers) are on a device from the start."""
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    device = torch.device(device)
    with ExitStack() as stack:
        stack.callback(setattr, nn.Module, "register_parameter", nn.Module.register_parameter)
        nn.Module.register_parameter = _registering_parameters(device)  # type: ignore[method-assign]
        if include_buffers:
            stack.callback(setattr, nn.Module, "register_buffer", nn.Module.register_buffer)
            nn.Module.register_buffer = _registering_buffers(device)  # type: ignore[method-assign]
            stack.enter_context(device)
        if device.type == "meta":
            _skip_initialisers(stack)
            if gc.isenabled():
                # A third of the time goes into searching ever more modules for garbage, and there is none.
                stack.callback(gc.enable)
                gc.disable()
        yield


def _registering_parameters(device: torch.device) -> Callable[..., None]:
    register = nn.Module.register_parameter
    # A parameter that is given to two modules is still one when it has moved; its memory is not kept for that.
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.device == device:
            return
        before, after = moved.get(id(param), (None, None))
        if after is None or before is None or before() is not param:
            after = like(param, _data(param.detach(), device))
            moved[id(param)] = weakref.ref(param), after
        module._parameters[name] = after

    return register_parameter


def _registering_buffers(device: torch.device) -> Callable[..., None]:
    register = nn.Module.register_buffer

    def register_buffer(module: nn.Module, name: str, tensor: torch.Tensor | None, *args: Any, **kwargs: Any) -> None:
        register(module, name, tensor if tensor is None else tensor.to(device), *args, **kwargs)

    return register_buffer


def _data(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Ten times faster than `to`, for the plain tensors that nearly all are.
    if device.type == "meta" and type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)


def _skip_initialisers(stack: ExitStack) -> None:
    """Lets those of `torch.nn.init` return at once where there is nothing to fill: it is most of the time."""
    for name, function in vars(nn.init).copy().items():
        if name.endswith("_") and not name.startswith("_") and callable(function):
            stack.callback(setattr, nn.init, name, function)
            setattr(nn.init, name, _unless_meta(function))


def _unless_meta(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

    return initialise
