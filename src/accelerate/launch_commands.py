"""What a launch tells its processes, for programs that start them by themselves."""

from __future__ import annotations

import argparse
import os
from typing import Any

from accelerate.launch.engines import deepspeed, elastic, mpi, sagemaker, single, tpu
from accelerate.launch.resolve import resolve
from accelerate.launch.settings import Settings
from accelerate.launch.variables import fp8, parallelism


def _settings(args: argparse.Namespace, **more: Any) -> Settings:
    """All settings, of a namespace that need not have more than what the caller knows of."""
    given = {"training_script": "", "training_script_args": [], **more, **vars(args)}
    return resolve(argparse.Namespace(**given))


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command and the whole environment of a launch of one process, or through mpirun."""
    settings = resolve(args)
    if settings.mpirun_hostfile is None:
        return single.command(settings), {**os.environ, **single.environment(settings)}
    plan = mpi.ENGINE.plan(settings)
    return plan.argv, {**os.environ, **plan.env}


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The whole environment of a launch of several processes."""
    return {**os.environ, **elastic.environment(_settings(args))}


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """The command of DeepSpeed's launcher (None where torch elastic starts the processes) and the environment."""
    settings = _settings(args, use_deepspeed=True)
    plan = deepspeed.ENGINE.plan(settings)
    command = None if settings.hosts is None else ["deepspeed", *deepspeed.own_launcher(settings)]
    return command, {**os.environ, **plan.env}


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Adds what XLA reads to an environment; for a pod, also to the variables of its machines."""
    added = tpu.variables(str(args.mixed_precision), bool(getattr(args, "downcast_bf16", False)))
    current_env.update(added)
    if pod:
        args.env = [*(getattr(args, "env", None) or []), *(f"{name}={value}" for name, value in added.items())]
    return args, current_env


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds the settings of fp8 that the arguments have to an environment."""
    current_env.update(fp8(args, only_given=True))
    return current_env


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds the axes to an environment."""
    args.use_parallelism_config = True
    current_env.update(parallelism(args))
    return current_env


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """The value of a variable that holds paths, with one more at its end."""
    return ":".join([path for path in os.environ.get(env_var_name, "").split(":") if path] + [str(path_to_add)])


def prepare_sagemager_args_inputs(sagemaker_config: Any, args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """What the SageMaker SDK is given for a job."""
    return sagemaker.job(sagemaker_config, args)
