"""From the settings of a plugin to the arguments and configs that Megatron-LM takes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

from accelerate.config.megatron import MegatronLMPlugin

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
}


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
