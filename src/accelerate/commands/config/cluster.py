"""The questions about machines of one's own."""

from __future__ import annotations

from typing import Any

from accelerate.commands.config import questions
from accelerate.config.enums import ComputeEnvironment, DistributedType
from accelerate.config.file import ClusterConfig
from accelerate.config.options import option
from accelerate.config.options.compiling import DYNAMO, FP8
from accelerate.config.options.compiling import DYNAMO_BACKENDS as COMPILERS
from accelerate.config.options.engines import MEGATRON, OFFLOAD, STAGES
from accelerate.config.options.launching import RENDEZVOUS
from accelerate.config.options.sharding import PARALLELISM, PREFETCH, STATE_DICTS, STRATEGIES, WRAPPING
from accelerate.constants import FSDP2_STATE_DICT_TYPE
from accelerate.environments.base import DEFAULT_PORT
from accelerate.launch import machine
from accelerate.launch.tpu import chips

__all__ = ["get_cluster_input"]

HARDWARE = {
    "NO": "one device: a GPU, or the CPU",
    "MULTI_CPU": "several processes on CPUs",
    "MULTI_GPU": "several GPUs (NVIDIA or AMD)",
    "MULTI_XPU": "several Intel GPUs",
    "MULTI_NPU": "several Ascend NPUs",
    "MULTI_MLU": "several Cambricon MLUs",
    "MULTI_SDAA": "several Tecorigin SDAAs",
    "MULTI_MUSA": "several Moore Threads GPUs",
    "MULTI_HPU": "several Intel Gaudis",
    "MULTI_NEURON": "several AWS Neuron cores",
    "XLA": "a TPU",
}
ENGINES = {
    "NONE": "every process has a copy of the model (DDP)",
    "FSDP": "parameters, gradients and optimizer states are sharded by PyTorch",
    "DEEPSPEED": "the same by DeepSpeed",
    "MEGATRON_LM": "layers and stages are spread by Megatron-LM",
}

FILTERS = {
    "all": "all of them",
    "exclusion": "all but some, which you name",
    "inclusion": "only those that you name",
}


def get_cluster_input() -> ClusterConfig:
    """Ask for all settings of a run on your own machines; each question depends on the answers so far.

    Returns:
        The config.
    """
    devices = machine.accelerators()
    answers: dict[str, Any] = {}
    found, reason = _hardware(devices)
    hardware = questions.choose("What will it run on?", HARDWARE, found, reason)
    several = hardware.startswith("MULTI_")
    answers["use_cpu"] = hardware == "MULTI_CPU" or (
        hardware == "NO"
        and questions.confirm(
            "Run on the CPU, even where there is a GPU?",
            bool(questions.earlier.get("cpu", devices.count == 0)),
            devices.reason,
        )
    )
    if several:
        answers |= _machines()
    machines = int(answers.get("num_machines", 1))
    engine = _engine(hardware, answers["use_cpu"])
    if engine == "DEEPSPEED":
        answers |= _deepspeed(machines)
    else:
        answers |= {"FSDP": _fsdp, "MEGATRON_LM": _megatron, "NONE": dict}[engine]()
    answers |= _processes(hardware, devices, machines, anew=hardware != found)
    if (
        hardware == "MULTI_CPU"
        and engine == "NONE"
        and questions.confirm("Start the processes with mpirun?", "mpirun_hostfile" in questions.earlier)
    ):
        answers["mpirun_config"] = {"mpirun_hostfile": questions.ask(option("mpirun_hostfile"), "~/hostfile")}
    answers |= _precision(hardware, devices, answers)
    answers |= _compile()
    if several:
        answers["debug"] = questions.ask(option("debug"))
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType(hardware if engine == "NONE" else engine),
        **{"debug": False, **answers},
    )


def _hardware(devices: machine.Accelerators) -> tuple[str, str]:
    before = str(questions.earlier.get("distributed_type"))
    if before in ENGINES:  # which does not say of what
        before = "MULTI_CPU" if questions.earlier.get("cpu") else "MULTI_GPU"
    if before in HARDWARE:
        return before, "from the file"
    if devices.count > 1:
        label = f"MULTI_{'GPU' if devices.kind == 'cuda' else devices.kind.upper()}"
        return label, f"{devices.count} devices: {devices.reason}"
    return "NO", f"{'one device' if devices.count else 'no GPU'}: {devices.reason}"


def _engine(hardware: str, cpu: bool) -> str:
    if hardware.startswith("MULTI_"):
        engines = {name: words for name, words in ENGINES.items() if not (cpu and name == "MEGATRON_LM")}
        before = str(questions.earlier.get("distributed_type"))
        start = before if before in engines else "NONE"
        return questions.choose("How is the model spread over the processes?", engines, start)
    # On one GPU, DeepSpeed is for what does not fit there.
    if hardware == "NO" and not cpu and questions.confirm("Use DeepSpeed, to keep a part of it off the GPU?", False):
        return "DEEPSPEED"
    return "NONE"


def _machines() -> dict[str, Any]:
    machines = questions.ask(option("num_machines"), 1) or 1
    answers: dict[str, Any] = {"num_machines": machines}
    if machines > 1:
        answers["machine_rank"] = questions.ask(option("machine_rank"), 0) or 0
        answers["main_process_ip"] = questions.ask(option("main_process_ip"), needed=True)
        answers["main_process_port"] = questions.ask(option("main_process_port"), DEFAULT_PORT)
        answers["same_network"] = questions.ask(option("same_network"), True)
        answers["rdzv_backend"] = questions.ask(option("rdzv_backend"), choices=RENDEZVOUS)
    return answers


def _processes(hardware: str, devices: machine.Accelerators, machines: int, *, anew: bool) -> dict[str, Any]:
    """anew: the file that is replaced counted processes for other hardware."""
    if hardware == "NO":
        return {"num_processes": 1}
    if hardware == "XLA" and (pod := _pod()):
        return pod  # whose machines know how many chips they have
    if hardware == "MULTI_CPU":
        suggestion, reason = 2 * machines, "two on each machine, to begin with"
    elif hardware == "XLA":
        suggestion, reason = max(1, chips()), "one per chip"
    else:
        suggestion = max(1, devices.count) * machines
        reason = f"one per device and machine: {devices.reason}"
    processes = questions.ask(option("num_processes"), suggestion, reason, anew=anew)
    answers: dict[str, Any] = {"num_processes": processes}
    if hardware.startswith("MULTI_") and hardware != "MULTI_CPU":
        answers["gpu_ids"] = questions.ask(option("gpu_ids"), "all") or "all"
        answers["enable_cpu_affinity"] = questions.ask(option("enable_cpu_affinity"))
    return answers


def _pod() -> dict[str, Any]:
    if not questions.confirm("Is it a pod of several machines, which this one starts?", False):
        return {}
    return {
        "tpu_use_cluster": True,
        "tpu_name": questions.text("What is the name of the pod?", None, str, needed=True),
        "tpu_zone": questions.text("In which zone is it?", None, str, needed=True),
        "tpu_use_sudo": questions.confirm("Run the script with sudo on its machines?", False),
    }


def _precision(hardware: str, devices: machine.Accelerators, answers: dict[str, Any]) -> dict[str, Any]:
    if (answers.get("deepspeed_config") or {}).get("deepspeed_config_file"):
        return {"mixed_precision": None}
    best, reason = ("no", "the CPU computes in fp32 best") if answers["use_cpu"] else machine.best_precision(devices)
    mode = questions.ask(option("mixed_precision"), best, reason)
    found: dict[str, Any] = {"mixed_precision": mode}
    if mode == "fp8":
        found["fp8_config"] = _fp8()
    if hardware == "XLA" and mode == "bf16":
        found["downcast_bf16"] = questions.ask(option("downcast_bf16"))
    return found


def _fp8() -> dict[str, Any]:
    backend = questions.ask(option("fp8_backend"), "ao")
    answers = {"backend": backend}
    for each in FP8.options[1:]:
        if each.question and each.help.endswith(f"({backend})"):
            answers[FP8.key_of(each)] = questions.ask(each)
    return answers


def _compile() -> dict[str, Any]:
    if not questions.confirm("Compile the model with torch.compile?", "dynamo_backend" in questions.earlier):
        return {}
    offered = option("dynamo_backend").offered
    compilers = {name: meaning for name, meaning in COMPILERS.items() if name in offered and name != "no"}
    answers: dict[str, Any] = {"dynamo_backend": questions.ask(option("dynamo_backend"), "inductor", choices=compilers)}
    if questions.confirm("Change how it compiles?", False):
        answers |= {each.name: questions.ask(each) for each in DYNAMO.options[1:]}
    return {"dynamo_config": {**answers, "dynamo_backend": answers["dynamo_backend"].upper()}}


def _fsdp() -> dict[str, Any]:
    version = questions.ask(option("fsdp_version"), "2", "version 2 is the one PyTorch develops")
    second = version == "2"
    answers: dict[str, Any] = {"fsdp_version": int(version)}
    names = ["fsdp_reshard_after_forward" if second else "fsdp_sharding_strategy", "fsdp_offload_params"]
    names += ["fsdp_auto_wrap_policy"] + ([] if second else ["fsdp_backward_prefetch"]) + ["fsdp_state_dict_type"]
    if not second:
        names += ["fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states"]
    names += ["fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing"]
    choices = {
        "fsdp_sharding_strategy": STRATEGIES,
        "fsdp_auto_wrap_policy": WRAPPING,
        "fsdp_backward_prefetch": PREFETCH,
        "fsdp_state_dict_type": {kind: STATE_DICTS[kind] for kind in FSDP2_STATE_DICT_TYPE} if second else STATE_DICTS,
    }
    for name in names:
        if name == "fsdp_reshard_after_forward":
            answers[name] = questions.confirm(option(name).question, bool(questions.earlier.get(name, True)))
        else:
            answers[name] = questions.ask(option(name), choices=choices.get(name))
        if answers[name] == "TRANSFORMER_BASED_WRAP":
            layers = questions.ask(option("fsdp_transformer_layer_cls_to_wrap"))
            answers |= {"fsdp_transformer_layer_cls_to_wrap": layers} if layers else {}
        if answers[name] == "SIZE_BASED_WRAP":
            answers["fsdp_min_num_params"] = questions.ask(option("fsdp_min_num_params"))
    found: dict[str, Any] = {"fsdp_config": answers}
    if second and questions.confirm("Combine sharding with copies, tensor or context parallelism?", False):
        found["parallelism_config"] = {each.name: questions.ask(each) for each in PARALLELISM.options if each.question}
    return found


def _deepspeed(machines: int) -> dict[str, Any]:
    own = questions.confirm("Is there a DeepSpeed config file?", "deepspeed_config_file" in questions.earlier)
    answers = _deepspeed_file() if own else _zero()
    if questions.confirm(
        "Does the model have layers of experts (MoE)?", "deepspeed_moe_layer_cls_names" in questions.earlier
    ):
        layers = questions.ask(option("deepspeed_moe_layer_cls_names"))
        answers |= {"deepspeed_moe_layer_cls_names": layers} if layers else {}
    return {"deepspeed_config": answers | (_deepspeed_machines() if machines > 1 else {})}


def _deepspeed_file() -> dict[str, Any]:
    path = questions.ask(option("deepspeed_config_file"), "none")
    return {"deepspeed_config_file": path, "zero3_init_flag": _confirmed("zero3_init_flag")}


def _zero() -> dict[str, Any]:
    stage = int(questions.ask(option("zero_stage"), "2", choices=STAGES))
    answers: dict[str, Any] = {"zero_stage": stage}
    if stage >= 2:
        places = OFFLOAD if stage == 3 else {place: OFFLOAD[place] for place in ("none", "cpu")}
        for what in ("optimizer", "param"):
            place = questions.ask(option(f"offload_{what}_device"), "none", choices=places)
            answers[f"offload_{what}_device"] = place
            if place == "nvme":
                answers[f"offload_{what}_nvme_path"] = questions.ask(option(f"offload_{what}_nvme_path"), "/nvme")
    answers["gradient_accumulation_steps"] = questions.ask(option("gradient_accumulation_steps"), 1)
    clipping = questions.ask(option("gradient_clipping"))
    if clipping is not None:
        answers["gradient_clipping"] = clipping
    if stage == 3:
        answers["zero3_save_16bit_model"] = _confirmed("zero3_save_16bit_model")
    answers["zero3_init_flag"] = stage == 3 and _confirmed("zero3_init_flag")
    return answers


def _deepspeed_machines() -> dict[str, Any]:
    launcher = questions.ask(option("deepspeed_multinode_launcher"), "pdsh")
    answers: dict[str, Any] = {"deepspeed_multinode_launcher": launcher}
    if launcher == "standard":
        return answers
    answers["deepspeed_hostfile"] = questions.ask(option("deepspeed_hostfile"), "hostfile")
    which = questions.choose("Which machines and devices of it?", FILTERS, "all")
    if which != "all":
        answers[f"deepspeed_{which}_filter"] = questions.ask(option(f"deepspeed_{which}_filter"))
    return answers


def _confirmed(name: str) -> bool:
    return questions.confirm(option(name).question, bool(questions.earlier.get(name)))


def _megatron() -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for each in MEGATRON.options:
        if not each.question:
            continue
        if each.name.endswith(("parallelism", "activations", "optimizer")):
            answers[each.name] = questions.confirm(each.question, True)
        else:
            answers[each.name] = questions.ask(each, 1 if each.default is None else each.default)
    return {"megatron_lm_config": answers}
