"""TPUs: one process, one for each chip by torch elastic, or a launch on each machine of a pod."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from accelerate.available import is_torch_xla_available
from accelerate.config.options import OPTIONS
from accelerate.config.options.base import FLAG, WORDS
from accelerate.launch import tpu
from accelerate.launch.engines import elastic, single
from accelerate.launch.plan import LaunchEngine, LaunchPlan
from accelerate.launch.settings import Settings

FUNCTION = str(Path(__file__).parents[1] / "function.py")
POD = str(Path(__file__).parents[1] / "pod.py")

# What is said to each machine of a pod in its own way, or not at all.
_NOT_PASSED_ON = (
    *("config_file", "dry_run", "tpu", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
    *("num_machines", "machine_rank", "main_process_ip"),
)


def variables(mixed_precision: str, downcast_bf16: bool) -> dict[str, str]:
    """What XLA reads, up to torch_xla 2.5: which of Python's floats are bf16."""
    if mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16": "1"} if downcast_bf16 else {"XLA_USE_BF16": "1"}


def _plan(settings: Settings) -> LaunchPlan:
    if settings.tpu_use_cluster:
        return _of_pod(settings)
    tpu.check(settings)
    settings = _through_function(settings)
    missing = "" if is_torch_xla_available() else "A TPU needs torch_xla: install the release that matches your torch."
    # Without a TPU the script then says so, instead of training on the CPU.
    told = {**variables(settings.mixed_precision, bool(settings.downcast_bf16)), "ACCELERATE_TORCH_DEVICE": "xla"}
    if settings.downcast_bf16:
        told["ACCELERATE_DOWNCAST_BF16"] = "true"
    if settings.elastic:
        plan = elastic.ENGINE.plan(settings)
        return replace(plan, env={**plan.env, **told}, missing=missing)
    chips = "all chips of a TPU" if settings.use_fsdp else "a TPU"
    env = {**single.environment(settings), **told}
    return LaunchPlan(f"one process on {chips}", single.command(settings), env, missing=missing)


def _function(settings: Settings) -> str | None:
    """The function of the script that is to be called. Every config file names `main`, which scripts call."""
    name = settings.main_training_function
    return None if name == "main" and settings.of["main_training_function"].source != "flag" else name


def _through_function(settings: Settings) -> Settings:
    """The same launch, of one function of the script, if that is asked for."""
    name = _function(settings)
    if name is None:
        return settings
    if settings.no_python:
        raise ValueError("`--main_training_function` names a function of a Python script: leave out `--no_python`.")
    kind = "module" if settings.module else "script"
    inner = replace(
        settings, script=FUNCTION, script_args=[name, kind, settings.script, *settings.script_args], of={**settings.of}
    )
    inner.put("module", False, "detected", "it is imported, and its function called")
    return inner


def _of_pod(settings: Settings) -> LaunchPlan:
    """One launch on each machine; where their number is not given, on all that there are."""
    if settings.use_fsdp:
        raise ValueError(
            "FSDP on a TPU uses one process for all chips of one machine, not of a pod: leave out `--use_fsdp`."
        )
    machines = _machines(settings)
    argv = [sys.executable, POD, *(json.dumps([name, *words]) for name, words in machines.items())]
    program = next(iter(machines.values()))[0]
    missing = (
        ""
        if shutil.which(program)
        else f"`{program}` is not installed here, but `--tpu_cluster` needs it to reach the pod: install it first."
    )
    count = "all" if len(machines) == 1 else len(machines)
    return LaunchPlan(f"{count} machines of a TPU pod, by {program}", argv, {}, machines=machines, missing=missing)


def _machines(settings: Settings) -> dict[str, list[str]]:
    """By the name of a machine, what is run here to start its part."""
    if settings.tpu_vm:
        address = settings.main_process_ip or settings.tpu_vm[0]
        count = len(settings.tpu_vm)
        return {
            name: ["ssh", name, _remote(settings, count, rank, address)] for rank, name in enumerate(settings.tpu_vm)
        }
    name, zone = getattr(settings.file, "tpu_name", None), getattr(settings.file, "tpu_zone", None)
    if not name or not zone:
        raise ValueError(
            "Which pod? Set `tpu_name` and `tpu_zone` in the config file, or name its machines, each with `--vm`."
        )
    gcloud = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", name, "--zone", zone]
    if settings.of["num_machines"].source == "default" or settings.num_machines == 1:
        return {"all machines": [*gcloud, "--worker", "all", "--command", _remote(settings)]}
    count, address = int(settings.num_machines), settings.main_process_ip
    return {
        f"worker {rank}": [
            *gcloud,
            *("--worker", str(rank), "--command", _remote(settings, count, rank, address)),
        ]
        for rank in range(count)
    }


def _remote(settings: Settings, count: int | None = None, rank: int = 0, address: str | None = None) -> str:
    """The command for a machine of the pod. address: of the first; without one, each finds the others by itself."""
    words = ["accelerate", "launch", "--tpu", *_flags(settings)]
    if count is not None and address is not None:
        words += ["--num_machines", str(count), "--machine_rank", str(rank), "--main_process_ip", address]
    words += [settings.script, *settings.script_args]
    if settings.tpu_env:
        words = ["env", *settings.tpu_env, *words]
    return shlex.join(["sudo", *words] if settings.tpu_use_sudo else words)


def _flags(settings: Settings) -> list[str]:
    """What was asked for here, by flags or in a file that the other machines do not have."""
    words: list[str] = []
    left_out = {*_NOT_PASSED_ON, *(() if _function(settings) else ("main_training_function",))}
    for name, option in OPTIONS.items():
        setting = settings.of[name]
        if setting.source not in ("flag", "file") or name in left_out or setting.value == option.default:
            continue
        flag = option.spellings[-1]
        if option.kind is FLAG:
            words += [flag] if setting.value else []
        elif option.kind is WORDS:
            words += [word for value in setting.value or () for word in (flag, str(value))]
        elif setting.value is not None:
            words += [flag, option.kind.shown(setting.value)]
    return words


ENGINE = LaunchEngine(matches=lambda settings: bool(settings.tpu), plan=_plan)
