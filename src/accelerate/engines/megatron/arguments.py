"""From the settings of a plugin to the arguments and configs that Megatron-LM takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.transformer import TransformerConfig

from accelerate.config.megatron import ARGUMENTS, SCHEDULE, MegatronLMPlugin
from accelerate.text import did_you_mean

# What train steps and providers may ask for, where nothing was said about it.
_DEFAULTS: dict[str, Any] = {
    "model_type_name": None,
    "pretraining_flag": True,
    "num_labels": None,
    "bert_binary_head": False,
    "model_return_dict": False,
    "return_logits": False,
    "eos_token_id": None,
    "vocab_file": None,
    "tokenizer_type": None,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "check_for_nan_in_loss_and_grad": False,
    "seq_length": None,
    "encoder_seq_length": None,
    "decoder_seq_length": None,
    "seed": None,
    "split": "969, 30, 1",
    "data_path": None,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "data_parallel_size": 1,
    "fp16": False,
    "bf16": False,
    "tensorboard_dir": None,
    "log_num_zeros_in_grad": False,
    "log_loss_scale_to_tensorboard": False,
    "log_batch_size_to_tensorboard": False,
    "lr_warmup_init": 0.0,
    "data_cache_path": None,
    "orig_vocab_size": None,
}
# What a model is built by, beside the fields of configs.
_OF_MODELS = ("transformer_impl", "padded_vocab_size", "make_vocab_size_divisible_by")
_CONFIGS = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
# What a field of the plugin decides before other arguments are looked at: groups of processes, loaders, schedules.
_BY_FIELD = {
    ARGUMENTS.get(name, name): name
    for name in (
        *("tp_degree", "pp_degree", "num_layers_per_virtual_pipeline_stage", "num_micro_batches"),
        *("sequence_parallelism", "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("decoder_last_pipeline_num_layers", "use_custom_fsdp", "no_load_optim", "no_save_optim"),
        *("no_wd_decay_cond", "scale_lr_cond", "lr_mult"),
        *SCHEDULE,
    )
}


def check_names(plugin: MegatronLMPlugin, given: Mapping[str, Any], where: str) -> None:
    """Refuse arguments that nothing here takes. A train step of the script may take any. where: they were given."""
    settled = {
        name: field for name, field in _BY_FIELD.items() if name in given and given[name] != getattr(plugin, field)
    }
    if settled:
        raise ValueError(
            f"`{where}` cannot be used to set "
            + ", ".join(f"`{name}`: set `{field}` of the MegatronLMPlugin" for name, field in settled.items())
            + "."
        )
    known = {field.name for config in _CONFIGS for field in dataclasses.fields(config) if field.init}
    known |= {*_DEFAULTS, *_OF_MODELS, *ARGUMENTS.values(), *_BY_FIELD}
    if plugin.custom_train_step_class is None:
        refuse_unknown(given, known, where, {field.name for field in dataclasses.fields(plugin)})


def refuse_unknown(given: Iterable[str], known: set[str], where: str, fields: Collection[str] = ()) -> None:
    """Refuse names that are not known, with the nearest that is. fields: of the plugin, which do not belong here."""
    unknown = [name for name in given if name not in known]
    if unknown:
        listed = (
            f"`{name}` (a field of the MegatronLMPlugin itself)"
            if name in fields
            else f"`{name}`{did_you_mean(name, known.union(fields))}"
            for name in unknown
        )
        raise ValueError(f"`{where}` has unknown names: {', '.join(listed)}; correct them, or leave them out.")


def arguments(plugin: MegatronLMPlugin) -> SimpleNamespace:
    """What a script may read as the arguments of Megatron-LM."""
    steps = {"train_iters": plugin.train_iters, "train_samples": plugin.train_samples}  # also without a scheduler
    args = SimpleNamespace(**{**_DEFAULTS, **steps, **plugin.megatron_lm_default_args})
    if args.model_type_name == "bert":
        args.bert_binary_head = bool(args.pretraining_flag and args.num_labels == 2)
    return args


def dtype_of(args: SimpleNamespace) -> torch.dtype:
    """The type of parameters and activations."""
    return torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32


def _fields(kind: type, args: SimpleNamespace) -> dict[str, Any]:
    """Those arguments that a config of megatron-core has a field for."""
    names = (field.name for field in dataclasses.fields(kind))
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def reduction_config(args: SimpleNamespace) -> DistributedDataParallelConfig:
    """How copies of the model exchange gradients: in fp32, as Megatron-LM does with small numbers."""
    fields = {"grad_reduce_in_fp32": args.bf16, **_fields(DistributedDataParallelConfig, args)}
    return DistributedDataParallelConfig(**fields)


def optimizer_config(args: SimpleNamespace, optimizer: Any) -> OptimizerConfig:
    """optimizer: that of the script, if any, which says whether its weight decay is part of the gradients."""
    fields = {"params_dtype": dtype_of(args), **_fields(OptimizerConfig, args)}
    if fields.get("optimizer") == "adam" and optimizer is not None:
        decoupled = optimizer.defaults.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        fields.setdefault("decoupled_weight_decay", decoupled)
        if fields.get("optimizer_cpu_offload") and not fields["decoupled_weight_decay"]:
            raise ValueError(
                "optimizer_cpu_offload=True of Megatron-LM has no Adam that adds weight decay to the gradients: "
                "use torch.optim.AdamW."
            )
    return OptimizerConfig(**fields)


def overrides(plugin: MegatronLMPlugin, config: OptimizerConfig, optimizer: Any) -> dict[ParamKey, Any]:
    """Which parameters have no weight decay, or another learning rate.

    optimizer: that of the script, if any. Where it has groups of its own for that, the rule is that of Megatron-LM:
    neither biases nor norms decay. One group of all parameters is taken by its word.
    """
    chosen: dict[ParamKey, Any] = {}
    if plugin.no_wd_decay_cond is not None:
        chosen[_where("no_wd_decay_cond", plugin.no_wd_decay_cond)] = {"wd_mult": 0.0}
    elif optimizer is None or len(optimizer.param_groups) > 1:
        chosen.update(get_standard_config_overrides(config))
    if plugin.scale_lr_cond is not None and config.lr is not None:
        rates = {"max_lr": config.lr * plugin.lr_mult, "min_lr": (config.min_lr or 0.0) * plugin.lr_mult}
        chosen[_where("scale_lr_cond", plugin.scale_lr_cond)] = rates
    return chosen


def _where(name: str, condition: Any) -> ParamKey:
    """A condition of the script, which takes the name first."""
    predicate = ParamWithNamePredicate(name=name, fn=lambda parameter, called: condition(called, parameter))
    return ParamKey(with_name_predicate=predicate)
