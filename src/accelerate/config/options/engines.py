"""DeepSpeed and Megatron-LM."""

from __future__ import annotations

from accelerate.config.options.base import (
    NUMBER,
    NUMBER_OR_AUTO,
    STAGE,
    TEXT,
    WHOLE,
    WHOLE_OR_AUTO,
    YES_NO,
    YES_NO_WORD,
    Family,
    Kind,
    Option,
)

OFFLOAD = {"none": "keep it on the GPU", "cpu": "in host memory", "nvme": "on a disk (stage 3)"}
LAUNCHERS = {
    "pdsh": "pdsh, over ssh",
    "standard": "you: `accelerate launch` on each of them, with its rank",
    "openmpi": "mpirun of Open MPI",
    "mvapich": "mpirun of MVAPICH2-GDR",
    "mpich": "mpirun of MPICH",
    "nossh": "you: on each of them with its rank, and DeepSpeed's launcher there",
    "slurm": "srun, inside a job",
    "impi": "mpirun of Intel MPI",
}
STAGES = {
    "0": "shard nothing",
    "1": "shard optimizer states",
    "2": "shard optimizer states and gradients",
    "3": "shard optimizer states, gradients and parameters",
}

DEEPSPEED = Family(
    "DeepSpeed",
    "With `--use_deepspeed`.",
    (
        Option(
            "deepspeed_config_file",
            "DeepSpeed's own config file; what it sets is not set elsewhere",
            env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
            question="Where is it?",
        ),
        Option(
            "zero_stage",
            "what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too",
            STAGE,
            env="ACCELERATE_DEEPSPEED_ZERO_STAGE",
            question="What should be sharded?",
        ),
        Option(
            "offload_optimizer_device",
            "where optimizer states live",
            choices=OFFLOAD,
            env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
            question="Where should optimizer states live?",
        ),
        Option(
            "offload_param_device",
            "where parameters live",
            choices=OFFLOAD,
            env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
            question="Where should parameters live?",
        ),
        Option(
            "offload_optimizer_nvme_path",
            "the disk for optimizer states",
            env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
            question="On which disk do optimizer states go?",
        ),
        Option(
            "offload_param_nvme_path",
            "the disk for parameters",
            env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
            question="On which disk do parameters go?",
        ),
        Option(
            "gradient_accumulation_steps",
            "micro-batches per step; auto: as the script says",
            WHOLE_OR_AUTO,
            env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            question="How many micro-batches make a step?",
        ),
        Option(
            "gradient_clipping",
            "the largest norm of the gradients; auto: as the script says",
            NUMBER_OR_AUTO,
            env="ACCELERATE_GRADIENT_CLIPPING",
            question="What is the largest norm of the gradients?",
        ),
        Option(
            "zero3_init_flag",
            "shard models while they are built (stage 3)",
            YES_NO_WORD,
            env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
            question="Shard models while they are built?",
        ),
        Option(
            "zero3_save_16bit_model",
            "gather 16-bit weights when saving (stage 3)",
            YES_NO_WORD,
            env="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
            question="Gather 16-bit weights when saving?",
        ),
        Option(
            "deepspeed_hostfile",
            "the file that lists the machines, a line each: `worker-1 slots=4`",
            question="Which file lists the machines, a line each such as `worker-1 slots=4`?",
        ),
        Option(
            "deepspeed_exclusion_filter",
            "machines and devices of that file to leave out: `worker-1@worker-2:0,2`",
            question="Which of them, and which of their devices, are left out, such as worker-1@worker-2:0,2?",
        ),
        Option(
            "deepspeed_inclusion_filter",
            "the ones to use, in the same form",
            question="Which of them, and which of their devices, are used, such as worker-1@worker-2:0,2?",
        ),
        Option(
            "deepspeed_multinode_launcher",
            "what starts the other machines; default: pdsh",
            choices=LAUNCHERS,
            question="What starts the other machines?",
        ),
        Option(
            "deepspeed_moe_layer_cls_names",
            "names of mixture-of-experts layers, separated by commas",
            env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
            question="Which layer classes are mixtures of experts (separated by commas)?",
        ),
    ),
    section="deepspeed_config",
    switch="use_deepspeed",
)


def _megatron(name: str, help: str, kind: Kind, default: object = None, question: str = "") -> Option:
    return Option(f"megatron_lm_{name}", help, kind, default, question=question)


MEGATRON = Family(
    "Megatron-LM",
    "With `--use_megatron_lm`.",
    (
        _megatron(
            "tp_degree", "processes that share each layer", WHOLE, 1, "Over how many processes is each layer spread?"
        ),
        _megatron("use_custom_fsdp", "use Megatron's own FSDP", YES_NO, False),
        _megatron("no_load_optim", "do not load the optimizer", YES_NO, False),
        _megatron("eod_mask_loss", "no loss at the end of a document", YES_NO, False),
        _megatron("overlap_cpu_optimizer_d2h_h2d", "overlap the copies of the offloaded optimizer", YES_NO, False),
        _megatron("no_save_optim", "do not save the optimizer", YES_NO, False),
        _megatron("optimizer_cpu_offload", "keep the optimizer on the CPU", YES_NO, False),
        _megatron("use_precision_aware_optimizer", "keep optimizer states in lower precision", YES_NO, False),
        _megatron("decoder_last_pipeline_num_layers", "layers of the decoder's last stage", WHOLE),
        _megatron("pp_degree", "stages of the pipeline", WHOLE, 1, "How many stages does the pipeline have?"),
        _megatron("num_micro_batches", "micro-batches per step", WHOLE, None, "How many micro-batches make a step?"),
        _megatron("sequence_parallelism", "spread sequences too", TEXT, None, "Spread sequences too?"),
        _megatron(
            "recompute_activations",
            "recompute activations in the backward pass",
            TEXT,
            None,
            "Recompute activations in the backward pass?",
        ),
        _megatron(
            "use_distributed_optimizer",
            "shard the optimizer over the copies",
            TEXT,
            None,
            "Shard the optimizer over the copies?",
        ),
        _megatron(
            "gradient_clipping",
            "the largest norm of the gradients; 0 for none",
            NUMBER,
            1.0,
            "What is the largest norm of the gradients (0 for none)?",
        ),
        _megatron("recompute_granularity", "which activations are recomputed: full or selective", TEXT),
        _megatron("recompute_method", "uniform or block", TEXT),
        _megatron("recompute_num_layers", "layers per block", WHOLE),
        _megatron("attention_backend", "the attention kernel", TEXT),
        _megatron("expert_model_parallel_size", "processes that share the experts", WHOLE),
        _megatron("context_parallel_size", "processes that share each sequence", WHOLE),
        _megatron("attention_dropout", "dropout of the attention", NUMBER),
        _megatron("hidden_dropout", "dropout of hidden states", NUMBER),
        _megatron("attention_softmax_in_fp32", "softmax in fp32", TEXT),
        _megatron("expert_tensor_parallel_size", "processes that share each expert", WHOLE),
        _megatron("calculate_per_token_loss", "mean loss over tokens", TEXT),
        _megatron("use_rotary_position_embeddings", "rotary position embeddings", TEXT),
    ),
    section="megatron_lm_config",
    prefix="megatron_lm_",
    switch="use_megatron_lm",
    variables="",
)
