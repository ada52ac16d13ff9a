"""What is run, on which hardware, by how many processes, on how many machines."""

from __future__ import annotations

from accelerate.config.options.base import (
    ADDRESS,
    AT_LEAST_ONE,
    FLAG,
    MACHINES,
    NOT_NEGATIVE,
    PAIRS,
    PORT,
    SECONDS,
    STREAMS,
    TEXT,
    WHOLE,
    WORDS,
    Family,
    Option,
)

GENERAL = Family(
    "General",
    "",
    (
        Option("config_file", "the file with the settings; default: the one `accelerate config` writes", key=""),
        Option(
            "quiet",
            "after a failure, show only the script's own traceback",
            FLAG,
            False,
            key="",
            flags=("-q", "--quiet"),
        ),
        Option(
            "dry_run", "print commands, variables and where each setting came from; start nothing", FLAG, False, key=""
        ),
        Option("module", "the script is a module, as in `python -m`", FLAG, False, key="", flags=("-m", "--module")),
        Option("no_python", "the script is a program, not Python", FLAG, False, key=""),
        Option(
            "debug",
            "compare what all ranks are about to do before each collective (slower)",
            FLAG,
            False,
            env="ACCELERATE_DEBUG_MODE",
            question="Compare what all ranks are about to do before each collective? It finds hangs, and costs time.",
        ),
    ),
)

HARDWARE = Family(
    "Hardware",
    "What to run on; by default, the fastest device that is found.",
    (
        Option(
            "cpu",
            "use the CPU, even if there is a faster device",
            FLAG,
            False,
            env="ACCELERATE_USE_CPU",
            key="use_cpu",
        ),
        Option("multi_gpu", "one process per GPU (or NPU, XPU, ...), several of them", FLAG, False, key=""),
        Option("tpu", "use a TPU", FLAG, False, key=""),
    ),
)

PRECISIONS = {
    "no": "the model's own number format",
    "fp16": "half precision with a gradient scaler: any recent GPU",
    "bf16": "half precision with the range of fp32, no scaler: newer GPUs, TPUs and CPUs",
    "fp8": "products of linear layers in 8 bits: GPUs of compute capability 8.9 or more, with torchao",
}

RESOURCES = Family(
    "Resources",
    "How many processes and machines, and in which precision.",
    (
        Option(
            "mixed_precision",
            "the number format of the forward pass",
            choices=PRECISIONS,
            env="ACCELERATE_MIXED_PRECISION",
            question="Which number format should the forward pass use?",
        ),
        Option(
            "num_processes",
            "processes in all, over all machines; default: one per device",
            AT_LEAST_ONE,
            question="How many processes in all, over all machines?",
        ),
        Option("num_machines", "machines that take part", AT_LEAST_ONE, question="How many machines take part?"),
        Option(
            "nnodes",
            "machines that take part, as torchrun counts them; `1:2`: one is enough, and a second may come and go",
            MACHINES,
            key="",
        ),
        Option(
            "num_cpu_threads_per_process",
            "threads each process computes with on the CPU (OMP_NUM_THREADS)",
            AT_LEAST_ONE,
            env="OMP_NUM_THREADS",
            key="",
        ),
        Option(
            "enable_cpu_affinity",
            "keep each process on the processors closest to its GPU",
            FLAG,
            False,
            env="ACCELERATE_CPU_AFFINITY",
            question="Keep each process on the processors closest to its GPU?",
        ),
    ),
)

PARADIGMS = Family(
    "Engines",
    "How a model is spread over the processes; without one of these, every process has a copy.",
    (
        Option("use_deepspeed", "use DeepSpeed", FLAG, False, key=""),
        Option("use_fsdp", "use Fully Sharded Data Parallel", FLAG, False, key=""),
        Option(
            "use_parallelism_config",
            "spread over several axes at once: data, shard, tensor, context",
            FLAG,
            False,
            key="",
        ),
        Option("use_megatron_lm", "use Megatron-LM", FLAG, False, key=""),
    ),
)

RENDEZVOUS = {
    "static": "every machine knows its rank and the address of the first",
    "c10d": "machines meet at an address and get their ranks there; they may come and go",
}

DISTRIBUTED = Family(
    "Processes and machines",
    "Who takes part and where they meet.",
    (
        Option(
            "gpu_ids",
            "the GPUs of this machine to use, such as `0,2`; default: all",
            question="Which GPUs of this machine, such as 0,2? (all: every one)",
        ),
        Option(
            "same_network",
            "all machines reach each other directly",
            FLAG,
            False,
            question="Do all machines reach each other directly?",
        ),
        Option(
            "machine_rank",
            "which machine this is, counted from 0",
            WHOLE,
            question="Which machine is this, counted from 0?",
        ),
        Option(
            "main_process_ip",
            "the address of the machine with rank 0",
            ADDRESS,
            question="What is the address of the machine with rank 0?",
        ),
        Option(
            "main_process_port",
            "the port to meet at; 0: any free one",
            PORT,
            question="At which port do the processes meet?",
        ),
        Option(
            "tee",
            "also write what the processes print to files: 1 output, 2 errors, 3 both",
            STREAMS,
            "0",
            key="",
            flags=("-t", "--tee"),
        ),
        Option("log_dir", "where those files go", key=""),
        Option("role", "a name for these processes in the launcher's messages", default="default", key=""),
        Option(
            "rdzv_backend",
            f"how machines find each other: {', '.join(RENDEZVOUS)} or another one that torchrun knows",
            default="static",
            question="How do the machines find each other?",
        ),
        Option("rdzv_conf", "settings of that, such as `timeout=900,is_host=1`", PAIRS, default="", key=""),
        Option("max_restarts", "start all processes again when one fails, at most N times", NOT_NEGATIVE, 0, key=""),
        Option(
            "hang_timeout",
            "after so many seconds of waiting, show which rank waits where; 0: never (default: 60)",
            SECONDS,
            env="ACCELERATE_HANG_TIMEOUT",
        ),
        Option(
            "hang_timeout_action",
            "what to do then",
            choices={"warn": "say so, and let it run", "abort": "say so, and end the run"},
            env="ACCELERATE_HANG_TIMEOUT_ACTION",
        ),
        Option(
            "preemption",
            "what to do when SIGTERM or SIGUSR1 comes, as from a cluster that wants its machines back",
            choices={"save": "save the run at the next step on all ranks, and end with code 75"},
            env="ACCELERATE_PREEMPTION",
        ),
        Option(
            "resume",
            "whether `accelerator.resume()` loads a checkpoint",
            choices={"auto": "the newest complete one of the project, if there is one"},
            env="ACCELERATE_RESUME",
        ),
        Option("monitor_interval", "seconds between two checks of the processes", SECONDS, 0.1, key=""),
    ),
)

MPI = Family(
    "MPI",
    "Starting through mpirun.",
    (
        Option(
            "mpirun_hostfile",
            "start with mpirun on the machines of this file",
            question="Which file lists the machines for mpirun?",
        ),
    ),
    section="mpirun_config",
    prefix="mpirun_",
)

TPU = Family(
    "TPU",
    "For TPUs.",
    (
        Option(
            "tpu_use_cluster",
            "run on all machines of a TPU pod",
            FLAG,
            False,
            flags=("--tpu_cluster",),
            negative="--no_tpu_cluster",
        ),
        Option("tpu_use_sudo", "use sudo on them", FLAG, False),
        Option("tpu_vm", "the machines of the pod, one flag each", WORDS, flags=("--vm",)),
        Option("tpu_env", "variables to set there, `NAME=value`, one flag each", WORDS, flags=("--env",)),
        Option(
            "main_training_function",
            "the function of the script to call on each chip, for scripts that do not call it",
            question="What is the name of the script's main function?",
        ),
        Option(
            "downcast_bf16",
            "under bf16, keep parameters in bf16 too, and those of double precision in fp32",
            FLAG,
            False,
            question="Under bf16, keep parameters in bf16 too? Half the memory, and less exact steps.",
        ),
    ),
)

AWS = Family(
    "AWS",
    "For SageMaker.",
    (
        Option("aws_access_key_id", "the access key of your account", key=""),
        Option("aws_secret_access_key", "its secret", key=""),
    ),
    absent=True,
)

# Known to the config file alone: what to run on, and what `tpu-config` and the question of the engine need.
FILE_ONLY = Family(
    "",
    "",
    (
        Option("compute_environment", "", TEXT),
        Option("distributed_type", "", TEXT),
        Option("tpu_name", "", TEXT),
        Option("tpu_zone", "", TEXT),
        Option("commands", "", WORDS),
        Option("command_file", "", TEXT),
    ),
)
