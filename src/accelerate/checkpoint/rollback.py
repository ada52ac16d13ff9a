"""Rollback: what is kept of objects while they load by code of their own, which may object halfway."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from accelerate.io.host_memory import HostMemory, is_plain
from accelerate.torch_internals.modules import buffers_of, parameters_of


def snapshot_object(item: Any, undo: ExitStack) -> None:
    """Have `undo` give an object the state that it has now."""
    with suppress(Exception):  # one that cannot say now what its state is has none to go back to
        undo.callback(_give_back, item, HostMemory().copy(item.state_dict()))


def _give_back(item: Any, state: Any) -> None:
    with suppress(Exception):  # what it has objected to is going to be raised
        item.load_state_dict(state)


def snapshot_optimizer(optimizer: Any, undo: ExitStack) -> None:
    """Have `undo` give an optimizer its present groups and states: to load makes new ones, and leaves tensors alone."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for values in (*inner.param_groups, *inner.state.values()):
        undo.callback(values.update, dict(values))
    for part in (optimizer, inner):
        undo.callback(part.__dict__.update, dict(part.__dict__))


def snapshot_model(model: torch.nn.Module, undo: ExitStack) -> None:
    """Have `undo` give a model its present parameters and buffers, with their values, of which the host gets a copy."""
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
    """The part of a tensor that one made with `expand`, as `like` is, has room for: each place in its memory once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
