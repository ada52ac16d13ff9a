"""Undoing a load that fails: which objects load by code of their own, and what puts back the state they had."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.io.host_memory import HostMemory, is_plain
from accelerate.torch_internals.modules import (
    FindHook,
    buffers_of,
    has_post_load_hooks,
    has_pre_load_hooks,
    loads_by_code_of,
    parameters_of,
)


def overrides_load(model: nn.Module) -> bool:
    """Whether a model overrides `load_state_dict`."""
    return type(model).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(model)


def loads_by_own_code(model: nn.Module, names_fit: bool = True, except_for: FindHook | None = None) -> bool:
    """Whether a model runs code of its own when it loads, which may change the state or fail.

    Hooks (but those `except_for`), extra state and overridden methods are such code. names_fit: if the names in a
    checkpoint are those of the model, the code of torch's own modules does not count: it only translates older names.
    """
    own = nn.Module.set_extra_state
    return overrides_load(model) or any(
        has_post_load_hooks(part, except_for)
        or has_pre_load_hooks(part, except_for)
        or type(part).set_extra_state is not own
        or not _loads_as_torch(loads_by_code_of(part), names_fit)
        for part in model.modules()
    )


def _loads_as_torch(code: str, names_fit: bool) -> bool:
    return code == nn.Module.__module__ or (names_fit and code.startswith("torch.nn.modules."))


def restore_object(item: Any, undo: ExitStack) -> None:
    """Have `undo` restore the present state of an object."""
    with suppress(Exception):  # an object that cannot give its state cannot be restored
        undo.callback(_give_back, item, HostMemory().copy(item.state_dict()))


def _give_back(item: Any, state: Any) -> None:
    with suppress(Exception):  # what it has objected to is going to be raised
        item.load_state_dict(state)


def restore_optimizer(optimizer: Any, undo: ExitStack) -> None:
    """Have `undo` restore the groups and states of an optimizer: loading replaces them and changes no tensor."""
    for values in (*optimizer.param_groups, *optimizer.state.values()):
        undo.callback(values.update, dict(values))
    undo.callback(optimizer.__dict__.update, dict(optimizer.__dict__))


def restore_model(model: torch.nn.Module, undo: ExitStack) -> None:
    """Have `undo` restore the parameters and buffers of a model, from a copy of their values in host memory."""
    tables: list[MutableMapping[str, Any]] = [
        table for part in model.modules() for table in (parameters_of(part), buffers_of(part))
    ]
    before = [dict(table) for table in tables]
    tensors = {id(own): own for names in before for own in names.values() if _has_value(own)}
    values = HostMemory().copy(tensors)

    def put_back() -> None:
        for table, names in zip(tables, before, strict=True):
            for name in table.keys() - names.keys():
                del table[name]
            for name, own in names.items():
                table[name] = own
        for key, own in tensors.items():
            with torch.no_grad(), suppress(RuntimeError):  # what cannot be written to is as it was
                target = own.detach()
                if is_plain(target):
                    dense_view(target, own).copy_(dense_view(values[key], own))
                else:
                    target.copy_(values[key])

    undo.callback(put_back)


def _has_value(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not is_lazy(tensor) and not tensor.is_meta


def dense_view(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of a tensor without the dimensions that `like` has from `expand`: each memory location once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
