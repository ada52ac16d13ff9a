"""As it was: what is kept of objects while they load by code of their own, which may object halfway."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from typing import Any

import torch

from accelerate.checkpoint.host import HostMemory, is_plain
from accelerate.torch_internals.modules import buffers_of, parameters_of


def keep_object(item: Any, undo: ExitStack) -> None:
    """Have `undo` give an object the state that it has now."""
    with suppress(Exception):  # one that cannot say now what its state is has none to go back to
        undo.callback(_give_back, item, HostMemory().copy(item.state_dict()))


def _give_back(item: Any, state: Any) -> None:
    with suppress(Exception):  # what it has objected to is going to be raised
        item.load_state_dict(state)


def keep_optimizer(optimizer: Any, undo: ExitStack) -> None:
    """Have `undo` give an optimizer its present groups and states: to load makes new ones, and leaves tensors alone."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for values in (*inner.param_groups, *inner.state.values()):
        undo.callback(values.update, dict(values))
    for part in (optimizer, inner):
        undo.callback(part.__dict__.update, dict(part.__dict__))


def keep_model(model: torch.nn.Module, undo: ExitStack) -> None:
    """Have `undo` give a model its present parameters and buffers, with their values, of which the host gets a copy."""
    holders: list[MutableMapping[str, Any]] = [
        holder for part in model.modules() for holder in (parameters_of(part), buffers_of(part))
    ]
    before = [dict(holder) for holder in holders]
    tensors = {id(own): own for names in before for own in names.values() if own is not None and is_plain(own)}
    values = HostMemory().copy(tensors)

    def put_back() -> None:
        for holder, names in zip(holders, before, strict=True):
            for name, own in names.items():
                holder[name] = own
        for key, own in tensors.items():
            with torch.no_grad(), suppress(RuntimeError):  # what cannot be written to is as it was
                once(own, own).copy_(once(values[key], own))

    undo.callback(put_back)


def once(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that one made with `expand`, as `like` is, has room for: each place in its memory once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
