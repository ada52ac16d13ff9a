"""FSDP, and spreading over several axes at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate.config.options.base import JSON, LOWER, WHOLE, YES_NO, YES_NO_WORD, Family, Kind, Option

STRATEGIES = {
    "FULL_SHARD": "parameters, gradients and optimizer states: least memory",
    "SHARD_GRAD_OP": "gradients and optimizer states; parameters stay gathered between forward and backward",
    "NO_SHARD": "nothing, as under DDP",
    "HYBRID_SHARD": "fully inside each machine, copies between machines",
    "HYBRID_SHARD_ZERO2": "gradients and optimizer states inside each machine, copies between machines",
}
WRAPPING = {
    "TRANSFORMER_BASED_WRAP": "one unit per layer class of a transformer",
    "SIZE_BASED_WRAP": "one unit per so many parameters",
    "NO_WRAP": "the whole model is one unit",
}
PREFETCH = {
    "BACKWARD_PRE": "before the current gradients: fastest, most memory",
    "BACKWARD_POST": "after the current gradients: a little slower, less memory",
    "NO_PREFETCH": "not ahead: slowest, least memory",
}
STATE_DICTS = {
    "SHARDED_STATE_DICT": "each process writes its shards: fast, any number of processes can load them",
    "FULL_STATE_DICT": "one process gathers and writes the full state dict",
    "LOCAL_STATE_DICT": "each process writes its flat shard",
}


def _among(names: Iterable[str], numbers: str = "") -> Kind:
    """One of these, in any case of letters. numbers: those that torch has for them, and older files have here."""

    def parsed(value: Any) -> str:
        if str(value).upper().removeprefix("_") not in {*names, *numbers}:
            raise ValueError
        return str(value)

    return Kind(f"one of {', '.join(names)}" + (", or the number that torch has for it" if numbers else ""), parsed)


FSDP = Family(
    "FSDP",
    "With `--use_fsdp`.",
    (
        Option(
            "fsdp_version",
            "1: FullyShardedDataParallel, 2: fully_shard",
            default="1",
            choices={"1": "FullyShardedDataParallel, the older one", "2": "fully_shard, per parameter"},
            question="Which version of FSDP?",
        ),
        Option(
            "fsdp_offload_params",
            "keep parameters and gradients on the CPU while they are not used",
            YES_NO_WORD,
            "false",
            question="Keep parameters and gradients on the CPU while they are not used? Saves memory, costs time.",
        ),
        Option(
            "fsdp_min_num_params",
            "parameters per unit (SIZE_BASED_WRAP)",
            WHOLE,
            100_000_000,
            question="How many parameters should a unit have?",
        ),
        Option(
            "fsdp_sharding_strategy",
            f"what is sharded (version 1): {', '.join(STRATEGIES)}",
            _among(STRATEGIES, "12345"),
            "FULL_SHARD",
            question="What should be sharded?",
        ),
        Option(
            "fsdp_reshard_after_forward",
            "free gathered parameters after the forward pass (version 2): yes or no; less memory, one more gather",
            LOWER,
            "true",
            question="Free gathered parameters after the forward pass? Less memory, one more gather.",
        ),
        Option(
            "fsdp_auto_wrap_policy",
            f"what makes a unit: {', '.join(WRAPPING)}",
            _among(WRAPPING),
            question="What makes a unit?",
        ),
        Option(
            "fsdp_transformer_layer_cls_to_wrap",
            "names of layer classes, separated by commas (TRANSFORMER_BASED_WRAP)",
            env="FSDP_TRANSFORMER_CLS_TO_WRAP",
            question="Which layer classes, separated by commas? (empty: those the model names itself)",
        ),
        Option(
            "fsdp_backward_prefetch",
            f"when the next parameters are gathered in the backward pass: {', '.join(PREFETCH)}",
            _among(PREFETCH, "12"),
            question="When are the next parameters gathered in the backward pass?",
        ),
        Option(
            "fsdp_state_dict_type",
            f"how checkpoints are written: {', '.join(STATE_DICTS)}",
            _among(STATE_DICTS, "123"),
            question="How should checkpoints be written?",
        ),
        Option(
            "fsdp_forward_prefetch",
            "gather the next parameters during the forward pass (the same order every time)",
            YES_NO_WORD,
            "false",
            question="Gather the next parameters during the forward pass?",
        ),
        Option(
            "fsdp_use_orig_params",
            "keep the model's own parameters visible, so that some may be frozen",
            YES_NO_WORD,
            "true",
            question="Keep the model's own parameters visible, so that some may be frozen?",
        ),
        Option(
            "fsdp_cpu_ram_efficient_loading",
            "only rank 0 loads a pretrained model, the others start empty",
            YES_NO_WORD,
            "true",
            question="Let only rank 0 load a pretrained model, while the others start empty?",
        ),
        Option(
            "fsdp_sync_module_states",
            "start with the parameters of rank 0 everywhere",
            YES_NO_WORD,
            "true",
            question="Start with the parameters of rank 0 everywhere?",
        ),
        Option(
            "fsdp_activation_checkpointing",
            "recompute activations in the backward pass instead of keeping them",
            YES_NO_WORD,
            "false",
            question="Recompute activations in the backward pass? Saves memory, costs time.",
        ),
        Option(
            "fsdp_activation_checkpointing_offload",
            "keep checkpointed activations on the CPU",
            YES_NO_WORD,
            "false",
        ),
        Option("fsdp_xla", "shard over the chips of a TPU (the same as `--tpu`)", YES_NO_WORD, env=""),
        Option("fsdp_xla_fsdp_v2", "by SPMD, which is the only way here", YES_NO_WORD, env=""),
        Option(
            "fsdp_xla_fsdp_settings",
            'on a TPU, as JSON: `{"shard_param_on_dim_0": true}` cuts parameters along their first dimension',
            JSON,
        ),
        Option(
            "fsdp_xla_fsdp_grad_ckpt",
            "on a TPU: the same as `--fsdp_activation_checkpointing`",
            YES_NO_WORD,
        ),
        Option("fsdp_ignored_modules", "names of modules that are not sharded, as a pattern"),
    ),
    section="fsdp_config",
    prefix="fsdp_",
    switch="use_fsdp",
    variables="",
)

PARALLELISM = Family(
    "Parallelism",
    "With `--use_parallelism_config`: the sizes multiply to the number of processes.",
    (
        Option(
            "parallelism_config_dp_replicate_size",
            "copies of the model",
            WHOLE,
            1,
            question="How many copies of the model?",
        ),
        Option(
            "parallelism_config_dp_shard_size",
            "processes that share a copy's parameters (FSDP)",
            WHOLE,
            1,
            question="Over how many processes are a copy's parameters sharded?",
        ),
        Option(
            "parallelism_config_tp_size",
            "processes that share each layer (tensor parallel)",
            WHOLE,
            1,
            question="Over how many processes is each layer spread?",
        ),
        Option(
            "parallelism_config_cp_size",
            "processes that share each sequence (context parallel)",
            WHOLE,
            1,
            question="Over how many processes is each sequence spread?",
        ),
        Option(
            "parallelism_config_cp_backend",
            "the library that does context parallelism",
            default="torch",
            choices={"torch": "PyTorch"},
        ),
        Option(
            "parallelism_config_cp_comm_strategy",
            "how its processes exchange: allgather or alltoall",
            default="allgather",
            question="How do they exchange: allgather or alltoall?",
        ),
        Option(
            "parallelism_config_sp_size",
            "processes that share each sequence in DeepSpeed's way (sequence parallel)",
            WHOLE,
            1,
        ),
        Option(
            "parallelism_config_sp_backend",
            "the library that does sequence parallelism",
            default="deepspeed",
            choices={"deepspeed": "DeepSpeed"},
        ),
        Option(
            "parallelism_config_sp_seq_length",
            "the length of a sequence",
        ),
        Option(
            "parallelism_config_sp_seq_length_is_variable",
            "whether that length changes",
            YES_NO,
            True,
        ),
        Option(
            "parallelism_config_sp_attn_implementation",
            "the attention: sdpa, flash_attention_2 or flash_attention_3",
            default="sdpa",
        ),
    ),
    section="parallelism_config",
    prefix="parallelism_config_",
    switch="use_parallelism_config",
    variables="",
)

# Said only when the axis they belong to is there.
NEEDS_AXIS = {
    "parallelism_config_cp_comm_strategy": "parallelism_config_cp_size",
    "parallelism_config_sp_seq_length": "parallelism_config_sp_size",
    "parallelism_config_sp_seq_length_is_variable": "parallelism_config_sp_size",
    "parallelism_config_sp_attn_implementation": "parallelism_config_sp_size",
}
