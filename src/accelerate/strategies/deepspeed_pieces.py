"""The weights of a model that ZeRO-3 keeps in pieces, put together and shared out, a few at a time."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from accelerate.checkpoint.model_weights import Fetch
from accelerate.errors import warn
from accelerate.unwrap import extract_model_from_parallel


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters of a model lie in pieces."""
    return isinstance(model, deepspeed.DeepSpeedEngine) and model.zero_optimization_partition_weights()


def stream(model: nn.Module) -> tuple[dict[str, Any], Fetch]:
    """What weights a model has, without their values, and what puts some of them together, called on all processes."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    own: dict[str, Any] = inner.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    own = {name: value for name, value in own.items() if first.setdefault(id(value), name) == name}

    def fetch(part: dict[str, Any], keep: bool) -> dict[str, Any]:
        pieces = [own[name] for name in part if hasattr(own[name], "ds_id")]
        with deepspeed.zero.GatheredParameters(pieces):
            return {name: own[name].detach().cpu().clone() for name in part} if keep else {}

    return {name: _described(value) for name, value in own.items()}, fetch


def gathered(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The whole weights of a model, put together one after the other. keep: on this process."""
    names, fetch = stream(model)
    return {name: value for each in names for name, value in fetch({each: None}, keep).items()}


def share_out(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Put whole weights into a model in pieces, one after the other."""
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in weights.items():
        with torch.no_grad(), deepspeed.zero.GatheredParameters([own[name]], modifier_rank=0):
            own[name].copy_(value)


def warn_of_empty_state_dict(engine: Any) -> None:
    """Have the `state_dict` of a model in pieces say, once, that what it returns is empty; not to its engine."""
    asks, said = False, False
    own = engine.module_state_dict

    def module_state_dict(*args: Any, **kwargs: Any) -> Any:
        nonlocal asks
        asks = True
        try:
            return own(*args, **kwargs)
        finally:
            asks = False

    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        nonlocal said
        if asks or said or keep_vars:  # with keep_vars it is about the parameters, not about their values
            return
        said = True
        warn(
            f"`state_dict()` of this {type(module).__name__} holds empty tensors, because ZeRO-3 shards its "
            "parameters: call `accelerator.get_state_dict(model)`, or `accelerator.save_model(model, folder)`."
        )

    engine.module_state_dict = module_state_dict
    engine.module.register_state_dict_pre_hook(hook)


def _described(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(getattr(value, "ds_shape", value.shape), dtype=value.dtype, device="meta")
