"""The groups of processes of Megatron-LM: which of them share a model, and which have other data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from accelerate.comm.tree import recursively_apply
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.engines.megatron.arguments import check_names
from accelerate.engines.megatron.layers import has_transformer_engine
from accelerate.errors import NotYetSupported

# Words that megatron-core would not know, some of them only when a step is taken.
_CHOICES = {
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
}
# The group of all processes that the groups of Megatron-LM were made from; they end with it.
_made_from: Any = None


def data_parallel_size(plugin: MegatronLMPlugin, processes: int) -> int:
    """How many copies of the model there are."""
    assert plugin.tp_degree is not None and plugin.pp_degree is not None
    each = plugin.tp_degree * plugin.pp_degree
    if each < 1 or processes % each != 0:
        raise ValueError(
            f"A model on tp_degree={plugin.tp_degree} x pp_degree={plugin.pp_degree} processes does not fit the "
            f"{processes} processes of this run: start a multiple of {each}, or make the degrees smaller."
        )
    return processes // each


def check(plugin: MegatronLMPlugin) -> None:
    """Refuse what is not done here, before anything is made."""
    check_names(plugin, plugin.other_megatron_args or {}, "other_megatron_args")
    _check_values(plugin)
    if (plugin.context_parallel_size or 1) > 1:
        raise NotYetSupported(
            f"Megatron-LM with context_parallel_size={plugin.context_parallel_size}",
            "split sequences with FSDP (`ParallelismConfig(cp_size=...)`), or use sequence_parallelism=True.",
        )
    if plugin.use_custom_fsdp:
        raise NotYetSupported("use_custom_fsdp=True of Megatron-LM", "use FSDP (`fsdp_plugin`) to shard parameters.")
    if plugin.pipeline_model_parallel_split_rank is not None:
        raise NotYetSupported(
            "pipeline_model_parallel_split_rank, which megatron-core no longer has",
            "leave it out: encoder and decoder go through the same stages.",
        )
    if plugin.sequence_parallelism and plugin.tp_degree == 1:
        raise ValueError(
            "sequence_parallelism=True splits sequences over the tensor-parallel ranks: set tp_degree to 2 or "
            "more, or leave it out."
        )
    if plugin.overlap_cpu_optimizer_d2h_h2d and not plugin.optimizer_cpu_offload:
        raise ValueError(
            "overlap_cpu_optimizer_d2h_h2d=True is about the copies of an optimizer on the host: set "
            "optimizer_cpu_offload=True as well, or leave it out."
        )
    if plugin.use_precision_aware_optimizer and not (plugin.use_distributed_optimizer and has_transformer_engine()):
        raise ValueError(
            "use_precision_aware_optimizer=True needs use_distributed_optimizer=True, and Transformer Engine (`pip "
            "install transformer-engine`), which has its Adam: provide both, or leave it out."
        )


def _check_values(plugin: MegatronLMPlugin) -> None:
    for name in ("tp_degree", "pp_degree", "num_micro_batches", "recompute_num_layers", "eval_interval"):
        value = getattr(plugin, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} of the MegatronLMPlugin must be a whole number of at least 1.")
    for name, choices in _CHOICES.items():
        value = getattr(plugin, name)
        if value not in choices:
            raise ValueError(
                f"{name}={value!r} of the MegatronLMPlugin is unknown to Megatron-LM: choose one of "
                f"{', '.join(choices)}."
            )
    if plugin.gradient_clipping is not None and plugin.gradient_clipping < 0:
        raise ValueError(
            f"gradient_clipping={plugin.gradient_clipping} of the MegatronLMPlugin is less than 0: use 0.0 for none."
        )
    if len(plugin.consumed_samples or ()) > 3:
        raise ValueError(
            "consumed_samples of the MegatronLMPlugin are those of training, validation and test, and there are "
            f"{len(plugin.consumed_samples or ())} numbers: leave out the others."
        )
    if plugin.custom_train_step_kwargs and plugin.custom_train_step_class is None:
        raise ValueError(
            "custom_train_step_kwargs are arguments of a `custom_train_step_class`, which this MegatronLMPlugin does "
            "not have: set both, or leave them out."
        )


def begin(plugin: MegatronLMPlugin, processes: int) -> None:
    """Make the groups, unless those that there are fit. Called on all processes."""
    global _made_from
    check(plugin)
    data_parallel_size(plugin, processes)
    sizes = {
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "expert_model_parallel_size": plugin.expert_model_parallel_size,
    }
    if parallel_state.model_parallel_is_initialized():
        names = (name.removesuffix("_size") for name in sizes)
        found = [getattr(parallel_state, f"get_{name}_world_size")() for name in names]
        if found == list(sizes.values()) and _made_from in (None, dist.group.WORLD):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes, expert_tensor_parallel_size=plugin.expert_tensor_parallel_size)
    _made_from = dist.group.WORLD


def data_shares(plugin: MegatronLMPlugin, processes: int) -> list[int]:
    """For every rank, which share of the data it gets: all ranks of one copy of the model get the same."""
    copies = data_parallel_size(plugin, processes)
    assert plugin.tp_degree is not None
    # The order of Megatron-LM: tensors are split over neighbors, stages are furthest apart.
    return [rank // plugin.tp_degree % copies for rank in range(processes)]


def is_last_stage() -> bool:
    """Whether this process has the last layers, and so the losses."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def speaks_for_its_copy() -> bool:
    """Whether this is the process of its copy of the model whose outputs count."""
    return is_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Weights that are made in here are alike on all copies, and different where processes have parts of a tensor."""
    # Those that Megatron-LM draws from for dropout, too: they go on from here.
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        number = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        random.seed(number)
        torch.manual_seed(number)
        try:
            yield
        finally:
            random.setstate(state)


def from_last_stage(values: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """What the last stage has computed, on all of them."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return values
    source, group = (
        parallel_state.get_pipeline_model_parallel_last_rank(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    described: list[Any] = [[(name, value.shape, value.dtype) for name, value in values.items()]]
    dist.broadcast_object_list(described, source, group=group, device=device)
    found = {}
    for name, shape, dtype in described[0]:
        value = values[name].contiguous() if name in values else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, source, group=group)
        found[name] = value
    return found


def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """The mean of losses over the processes with other data."""
    mean = torch.stack([loss.detach().reshape(()) for loss in losses])
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of the processes with other data, one after the other."""
    group = parallel_state.get_data_parallel_group()

    def gather(value: torch.Tensor) -> torch.Tensor:
        value = value.reshape(1) if value.ndim == 0 else value.contiguous()
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value, group=group)
        return torch.cat(parts)

    return recursively_apply(gather, tensor, error_on_other_type=True)
