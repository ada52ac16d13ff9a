"""Weights of transformers into the shards of a Megatron-LM model, and out of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from accelerate.engines.megatron.conversion import Rule
from accelerate.engines.megatron.families import ModelFamily, family_of

# Norms that Transformer Engine keeps in the linear layer after them.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


class _Shard(NamedTuple):
    """A parameter of this rank, what it is made by, and the names of the weights it is made of."""

    parameter: nn.Parameter
    rule: Rule
    names: list[str]


def load_transformers_weights(
    modules: list[nn.Module], state_dict: Mapping[str, torch.Tensor], model_config: Any
) -> None:
    """Load the weights of a transformers model into the stages that this rank has.

    Args:
        modules: The stages, one or (with a virtual pipeline) more.
        state_dict: The full state dict of the transformers model, the same on every rank.
        model_config: Its config.
    """
    from megatron.core import parallel_state

    family = family_of(model_config)
    shards = list(_shards(modules, model_config))
    known = _known(family, model_config)
    unknown = [
        name
        for name in state_dict
        if not known.fullmatch(name) and not known.fullmatch(family.prefix + name) and not name.endswith(family.buffers)
    ]
    if unknown:
        raise ValueError(
            f"{len(unknown)} weights have no counterpart in a {model_config.model_type} model of Megatron-LM: "
            f"{', '.join(sorted(unknown)[:3])}."
        )
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for shard in shards:
            weights = [_weight(state_dict, name, family.prefix, model_config) for name in shard.names]
            whole = shard.rule.join(weights, _whole_shape(shard.parameter, ranks))
            expected = _whole_shape(shard.parameter, ranks)
            if whole.shape != expected:
                raise ValueError(
                    f"{', '.join(shard.names)} of the state dict make a parameter of {list(whole.shape)}, but the "
                    f"model has {list(expected)}: the state dict is of another config."
                )
            shard.parameter.copy_(_slice(whole, shard, rank, ranks))


def transformers_state_dict(modules: list[nn.Module], model_config: Any) -> dict[str, torch.Tensor] | None:
    """Gather the state dict of the transformers model. All ranks have to call it.

    Args:
        modules: The stages that this rank has.
        model_config: The config of the transformers model.

    Returns:
        The full state dict in host memory on the main process, rank 0; None on all others.
    """
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return None
    own = {}
    for shard in _shards(modules, model_config):
        if shard.rule.saved:
            for name, weight in zip(shard.names, shard.rule.split(_whole(shard)), strict=True):
                own[name] = weight.contiguous()
    gathered = _to_first_stage(own)
    if gathered is None:
        return None
    for name, source in family_of(model_config).tied(model_config).items():
        gathered[name] = gathered[source]
    return gathered


# --- names ----------------------------------------------------------------------------------------------------------


def _shards(modules: list[nn.Module], model_config: Any) -> Iterator[_Shard]:
    """The parameters of this rank, with the numbers that layers have in the whole model."""
    rules = {rule.parameter: rule for rule in family_of(model_config).rules(model_config)}
    for module in modules:
        module = unwrapped(module)
        for name, parameter in module.named_parameters():
            for fused, own in _FUSED.items():
                name = name.replace(fused, own)
            number: list[int] = []
            if found := _LAYER.fullmatch(name):
                layer: Any = module.get_submodule(found[1] + found[2])
                number = [layer.layer_number - 1]
                name = found[1] + "{}" + found[3]
            if name not in rules:
                raise ValueError(
                    f"The parameter {name!r} of this Megatron-LM model has no counterpart in transformers."
                )
            yield _Shard(parameter, rules[name], [pattern.format(*number) for pattern in rules[name].names])


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of megatron-core's wrappers."""
    while isinstance(getattr(module, "module", None), nn.Module):
        module = module.module  # type: ignore[assignment]
    return module


def _known(family: ModelFamily, model_config: Any) -> re.Pattern[str]:
    """The names of weights of all stages."""
    names = [name for rule in family.rules(model_config) for name in rule.names] + list(family.tied(model_config))
    return re.compile("|".join(re.escape(name).replace(r"\{\}", r"\d+") for name in names))


def _weight(state_dict: Mapping[str, torch.Tensor], name: str, prefix: str, model_config: Any) -> torch.Tensor:
    """A weight, also from a file of the model without its head, whose names have no prefix."""
    for known in (name, name.removeprefix(prefix)):
        if known in state_dict:
            return state_dict[known]
    raise KeyError(
        f"The state dict has no {name!r}, which this {model_config.model_type} model of Megatron-LM needs: it is "
        "incomplete, or of another config."
    )


# --- tensor parallel ------------------------------------------------------------------------------------------------


def _whole_shape(parameter: nn.Parameter, ranks: int) -> torch.Size:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= ranks  # type: ignore[attr-defined]
    return torch.Size(shape)


def _slice(whole: torch.Tensor, shard: _Shard, rank: int, ranks: int) -> torch.Tensor:
    """What a tensor-parallel rank has of a parameter."""
    if not getattr(shard.parameter, "tensor_model_parallel", False):
        return whole
    dim: int = shard.parameter.partition_dim  # type: ignore[attr-defined]
    return torch.cat([part.chunk(ranks, dim)[rank] for part in whole.chunk(shard.rule.stride, dim)], dim)


def _whole(shard: _Shard) -> torch.Tensor:
    """A parameter of all tensor-parallel ranks."""
    from megatron.core import parallel_state

    parameter = shard.parameter.detach()
    if not getattr(shard.parameter, "tensor_model_parallel", False):
        return parameter
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    parts = [torch.empty_like(parameter) for _ in range(ranks)]
    dist.all_gather(parts, parameter.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    dim: int = shard.parameter.partition_dim  # type: ignore[attr-defined]
    # Of each rank the first block, of each rank the second...
    blocks = zip(*(part.chunk(shard.rule.stride, dim) for part in parts), strict=True)
    return torch.cat([part for block in blocks for part in block], dim)


# --- pipeline parallel ----------------------------------------------------------------------------------------------


def _to_first_stage(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """All weights in host memory on the first tensor-parallel rank of the first pipeline stage."""
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return None
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = dist.get_process_group_ranks(group)
    described: list[Any] = [None] * len(stages)
    dist.all_gather_object(described, [(name, weight.shape, weight.dtype) for name, weight in own.items()], group=group)
    if dist.get_rank() != stages[0]:
        for weight in own.values():
            dist.send(weight, stages[0], group=group)
        return None
    device = next(iter(own.values())).device
    gathered = {name: _on_host(weight) for name, weight in own.items()}
    for stage, weights in zip(stages[1:], described[1:], strict=True):
        for name, shape, dtype in weights:
            received = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(received, stage, group=group)
            gathered[name] = received.cpu()
    return gathered


def _on_host(weight: torch.Tensor) -> torch.Tensor:
    """A copy, also of what is on the host already."""
    return weight.cpu() if weight.device.type != "cpu" else weight.clone()
