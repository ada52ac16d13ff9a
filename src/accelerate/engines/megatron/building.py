"""This process's part of a model, in the wrappers of Megatron-LM, with its optimizer and its scheduler."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import nn

from accelerate.comm import current
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.engines.megatron.arguments import dtype_of, optimizer_config, overrides, reduction_config

Provider = Callable[..., nn.Module]


def check_trains_all(model: nn.Module, optimizer: Any) -> None:
    """Refuse a model of which the script trains a part: the one that is built of it is trained as a whole."""
    parameters = dict(model.named_parameters())
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(
            f"Megatron-LM trains all parameters of a model, but `{frozen[0]}` is frozen (with {len(frozen) - 1} "
            "more): set `requires_grad` of all to True, or give the MegatronLMPlugin a "
            "`custom_model_provider_function`."
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [name for name, parameter in parameters.items() if id(parameter) not in held]
    if left_out:
        raise ValueError(
            f"Megatron-LM trains all parameters of a model, but {len(left_out)} of the {len(parameters)} parameters "
            f"are not in the optimizer (`{left_out[0]}` is the first): create it from `model.parameters()`."
        )


def make_models(
    plugin: MegatronLMPlugin, args: SimpleNamespace, device: torch.device, given: nn.Module | None
) -> list[nn.Module]:
    """This process's parts of the model: as the script provides them, or built like a model of transformers.

    given: that model, whose weights on the first process are taken over; without one, or without values, they are new.
    """
    own = plugin.custom_model_provider_function
    if plugin.custom_prepare_model_function is not None:
        if own is None:
            raise ValueError(
                "`custom_prepare_model_function` needs a `custom_model_provider_function`, which this plugin does "
                "not have: set both."
            )
        return list(plugin.custom_prepare_model_function(own))
    if own is not None:
        return wrapped(bare_chunks(own, args), args, device)
    from accelerate.engines.megatron import models, weights

    chunks = bare_chunks(functools.partial(models.build_model, plugin, plugin.model_config), args)
    if given is not None and (state := of_first_process(given.state_dict(), device)) is not None:
        weights.load_transformers_weights(chunks, state, plugin.model_config)
    return wrapped(chunks, args, device)


@torch.no_grad()
def of_first_process(state: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor] | None:
    """The weights that the first process has, on all of them; None where it has none. Called on all processes.

    A script that sets no seed has drawn others on each, and a model is one. They are overwritten in place; a process
    whose weights have no values gets new tensors on the host.
    """
    communicator = current()
    has_values = [not any(value.is_meta for value in state.values())]
    communicator.broadcast_objects(has_values)
    if not has_values[0] or communicator.size == 1:
        return state if has_values[0] else None
    found = {}
    for name, value in state.items():
        sent = torch.empty_like(value, device=device) if value.is_meta else value.to(device).contiguous()
        communicator.broadcast(sent)
        found[name] = sent.cpu() if value.is_meta else value.copy_(sent)
    return found


def bare_chunks(provider: Provider, args: SimpleNamespace) -> list[nn.Module]:
    """What a provider makes for this process: one model, or several where stages take turns."""
    turns = _turns(args)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(turns)
    if turns is None:
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        return [provider(pre_process=first, post_process=last)]
    chunks = []
    for stage in range(turns):
        more = {"vp_stage": stage} if _takes(provider, "vp_stage") else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunk: Any = provider(pre_process=first, post_process=last, **more)
        chunk.vp_stage = stage
        chunks.append(chunk)
    return chunks


def _turns(args: SimpleNamespace) -> int | None:
    """How many parts of the model each stage has, where they are interleaved."""
    each, stages = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_size
    if each is None:
        return None
    layers = getattr(args, "num_layers", None)
    if stages < 2 or layers is None or layers % (each * stages) != 0:
        raise ValueError(
            f"num_layers_per_virtual_pipeline_stage={each} does not fit {layers} layers on {stages} stages: it takes "
            "two stages or more, and a number of layers that is a multiple of their product (`num_layers` in "
            "`other_megatron_args` for a model of your own)."
        )
    return int(layers // (each * stages))


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def wrapped(chunks: list[nn.Module], args: SimpleNamespace, device: torch.device) -> list[nn.Module]:
    """The chunks on the device, in their precision, with gradients that copies of the model exchange."""
    for chunk in chunks:
        config = get_model_config(chunk)
        if config.pipeline_dtype is None:
            config.pipeline_dtype = dtype_of(args)
        if len(chunks) > 1:
            # In one batch, two stages would take what each sends forward for what it sends back.
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.to(device)
    if args.fp16 or args.bf16:
        chunks = [Float16Module(get_model_config(chunk), chunk) for chunk in chunks]
    reduction = reduction_config(args)
    models: list[Any] = [
        DistributedDataParallel(get_model_config(chunk), reduction, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for model in models:
        model.broadcast_params()
    return models


def make_optimizer(
    plugin: MegatronLMPlugin, args: SimpleNamespace, models: list[nn.Module], optimizer: Any
) -> MegatronOptimizer:
    """An optimizer of Megatron-LM, like that of the script where there is one."""
    config = optimizer_config(args, optimizer)
    made = get_megatron_optimizer(config, models, overrides(plugin, config, optimizer))
    for group in made.param_groups:  # as a scheduler would, which there need not be
        group["lr"] = group["max_lr"]
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    made.skipped_iter = False
    return made


def make_scheduler(args: SimpleNamespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The scheduler that the arguments of `MegatronLMDummyScheduler` and of the plugin describe.

    It counts samples, as Megatron-LM does.
    """
    in_samples = args.train_iters is None and args.train_samples is not None
    each = 1 if in_samples else args.global_batch_size
    total = args.train_samples if in_samples else args.train_iters
    decay = (args.lr_decay_samples if in_samples else args.lr_decay_iters) or total
    warmup = (args.lr_warmup_samples if in_samples else args.lr_warmup_iters) or 0
    if not total or not decay:
        raise ValueError(
            "A schedule of Megatron-LM needs its number of steps: MegatronLMDummyScheduler(optimizer, "
            "total_num_steps=...), or `train_iters` of the plugin."
        )
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    if warmup >= decay:
        raise ValueError(f"A warm-up of {warmup} steps leaves no steps in a schedule of {decay}: make it shorter.")
    constant = args.weight_decay if args.start_weight_decay is None else args.start_weight_decay
    last = constant if args.end_weight_decay is None else args.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr or 0.0,
        lr_warmup_steps=int(warmup * each),
        lr_decay_steps=int(decay * each),
        lr_decay_style=args.lr_decay_style,
        start_wd=constant,
        end_wd=last,
        wd_incr_steps=int(total * each),
        wd_incr_style=args.weight_decay_incr_style,
    )
