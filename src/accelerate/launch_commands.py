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
    """Return the command and the environment of a launch of one process, or through mpirun.

    Args:
        args: the parsed arguments of `accelerate launch`.
    """
    settings = resolve(args)
    if settings.mpirun_hostfile is None:
        return single.command(settings), {**os.environ, **single.environment(settings)}
    plan = mpi.ENGINE.plan(settings)
    return plan.argv, {**os.environ, **plan.env}


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a launch of several processes.

    Args:
        args: the parsed arguments of `accelerate launch`.
    """
    return {**os.environ, **elastic.environment(_settings(args))}


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command and the environment of a launch with DeepSpeed.

    Args:
        args: the parsed arguments of `accelerate launch`.

    Returns:
        The command of DeepSpeed's launcher, or None where torch elastic starts the processes; and the environment.
    """
    settings = _settings(args, use_deepspeed=True)
    plan = deepspeed.ENGINE.plan(settings)
    command = None if settings.hosts is None else ["deepspeed", *deepspeed.own_launcher(settings)]
    return command, {**os.environ, **plan.env}


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add the variables that XLA reads to an environment.

    Args:
        args: the parsed arguments of `accelerate launch`.
        current_env: the environment.
        pod: also add them to the variables of the machines of a pod.

    Returns:
        The arguments and the environment.
    """
    added = tpu.variables(str(args.mixed_precision), bool(getattr(args, "downcast_bf16", False)))
    current_env.update(added)
    if pod:
        args.env = [*(getattr(args, "env", None) or []), *(f"{name}={value}" for name, value in added.items())]
    return args, current_env


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the fp8 settings among the arguments to an environment.

    Args:
        args: the parsed arguments of `accelerate launch`.
        current_env: the environment.

    Returns:
        The environment.
    """
    current_env.update(fp8(args, only_given=True))
    return current_env


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the axes of the device mesh among the arguments to an environment.

    Args:
        args: the parsed arguments of `accelerate launch`.
        current_env: the environment.

    Returns:
        The environment.
    """
    args.use_parallelism_config = True
    current_env.update(parallelism(args))
    return current_env


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return the value of a variable that holds paths, with one more path at its end.

    Args:
        env_var_name: the name of the variable.
        path_to_add: the path.
    """
    return ":".join([path for path in os.environ.get(env_var_name, "").split(":") if path] + [str(path_to_add)])


def prepare_sagemager_args_inputs(sagemaker_config: Any, args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Return what the SageMaker SDK is given for a job.

    Args:
        sagemaker_config: the config file.
        args: the parsed arguments of `accelerate launch`.
    """
    return sagemaker.job(sagemaker_config, args)
