"""Modules that are born without weights, or on a device."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from accelerate.big_modeling.module_walk import without_collecting_garbage
from accelerate.config.environment import parse_flag_from_env
from accelerate.offload.parameter_kinds import like
from accelerate.torch_internals.modules import (
    buffers_of,
    children_of,
    is_new_name,
    parameters_of,
    registration_hooks,
)

_META = torch.device("meta")

Replace = Callable[[Any, str, Any], None]
Move = Callable[[nn.Parameter], nn.Parameter]

# Attributes of these classes are neither tensors nor modules.
_PLAIN = frozenset((int, float, bool, str, tuple, type(None)))


class _Here(threading.local):
    """State of this thread: what is done with a new parameter."""

    move: Move | None = None


_HERE = _Here()


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models without memory for their parameters, however large they are. Ties between parameters are kept.

    Args:
        include_buffers: make buffers empty as well. By default they keep their values, unless
            `ACCELERATE_INIT_INCLUDE_BUFFERS` is set.

    Example:
        ```python
        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])
        ```
    """
    with init_on_device(_META, include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | int | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Build models whose parameters are on a device from the start.

    Args:
        device: the device.
        include_buffers: do the same for buffers, and for every tensor that is created without naming a device.

    Example:
        ```python
        with init_on_device("cuda"):
            model = nn.Linear(10, 10)
        ```
    """
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    device = torch.device(device)
    with ExitStack() as stack:
        if device.type == "meta":
            stack.enter_context(without_collecting_garbage())
        if include_buffers:
            # Torch does all of it, for this thread alone: nothing of its own has to be replaced.
            stack.enter_context(device)
        else:
            stack.enter_context(_PARAMETERS)
            if device.type == "meta":
                stack.enter_context(_EMPTY)
            stack.callback(setattr, _HERE, "move", _HERE.move)
            _HERE.move = _moving(device)
        yield


class _Replaced:
    """Replace attributes of torch for as long as some thread needs that. It can be entered repeatedly."""

    def __init__(self, replace: Callable[[Replace], None]) -> None:
        self._replace = replace
        self._lock = threading.Lock()
        self._users = 0
        self._old = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._replace(self._set)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._old.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._old.close()


def _moving(device: torch.device) -> Move:
    # A parameter that is given to two modules is still one when it has moved; its memory is not kept for that.
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    make = _emptied if device.type == "meta" else functools.partial(_moved, device=device)

    def move(parameter: nn.Parameter) -> nn.Parameter:
        if parameter.device == device:
            return parameter
        known = moved.get(id(parameter))
        if known is None or known[0]() is not parameter:
            known = moved[id(parameter)] = weakref.ref(parameter), make(parameter)
        return known[1]

    return move


def _register_parameters(replace: Replace) -> None:
    register = nn.Module.register_parameter

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        registered = parameters_of(module).get(name)  # a hook may have put another one there
        if registered is not None and _HERE.move is not None and (moved := _HERE.move(registered)) is not registered:
            parameters_of(module)[name] = moved

    replace(nn.Module, "register_parameter", register_parameter)


def _set_attributes(replace: Replace) -> None:
    """Take a shorter path for numbers and new parameters, the most common attributes: it is a quarter of the time."""
    set_attribute, register, hooks = nn.Module.__setattr__, nn.Module.register_parameter, registration_hooks()

    def __setattr__(module: nn.Module, name: str, value: Any) -> None:
        kind = type(value)
        if is_new_name(module, name):
            if kind in _PLAIN:
                object.__setattr__(module, name, value)
                return
            if (
                kind is nn.Parameter
                and value.grad_fn is None
                and name not in module.__dict__
                and "." not in name
                and not hasattr(type(module), name)
                and type(module).register_parameter is register
                and not hooks
                and (move := _HERE.move) is not None
            ):
                parameters_of(module)[name] = move(value)
                return
        set_attribute(module, name, value)

    replace(nn.Module, "__setattr__", __setattr__)


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    kind: Any = type(parameter)
    if issubclass(kind, UninitializedParameter):  # it has no values, and not even a shape
        made: nn.Parameter = kind(parameter.requires_grad, device=device, dtype=parameter.dtype)
        return made
    return like(parameter, parameter.detach().to(device))


def _emptied(parameter: nn.Parameter) -> nn.Parameter:
    # Five times faster than `to`, for the plain parameters that nearly all are.
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.__dict__:
        return _moved(parameter, _META)
    return nn.Parameter(torch.empty_like(parameter, device=_META), parameter.requires_grad)


def _skip_initializers(replace: Replace) -> None:
    """Make initializers return at once if there is nothing to fill: they take most of the time."""
    for name, function in vars(nn.init).copy().items():
        if name.endswith("_") and not name.startswith("_") and callable(function):
            replace(nn.init, name, _unless_meta(function))
    for kind in {base for layer in vars(nn).values() if isinstance(layer, type) for base in layer.__mro__}:
        reset = vars(kind).get("reset_parameters")
        if reset is not None:
            replace(kind, "reset_parameters", _unless_empty(reset))


def _unless_meta(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

    return initialize


def _unless_empty(function: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    @functools.wraps(function)
    def reset_parameters(module: nn.Module) -> None:
        # One with buffers or modules of its own has more to do.
        parameters = parameters_of(module).values()
        has_more = buffers_of(module) or children_of(module)
        if has_more or not all(value is None or value.is_meta for value in parameters):
            function(module)

    return reset_parameters


def _make_empty(replace: Replace) -> None:
    _set_attributes(replace)
    _skip_initializers(replace)


_PARAMETERS, _EMPTY = _Replaced(_register_parameters), _Replaced(_make_empty)
