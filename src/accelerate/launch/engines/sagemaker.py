"""Amazon SageMaker. A job is described; sending it there is not part of this version."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from accelerate.config.enums import SageMakerDistributedType
from accelerate.config.environment import str_to_bool
from accelerate.config.file import SageMakerConfig
from accelerate.launch.engines import single
from accelerate.launch.machine import Accelerators
from accelerate.launch.plan import LaunchEngine, LaunchPlan
from accelerate.launch.settings import Settings
from accelerate.launch.variables import variables

_DISTRIBUTION = {"smdistributed": {"dataparallel": {"enabled": True}}}


def job(config: SageMakerConfig, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str] | None]:
    """What the SageMaker SDK is given: the arguments of its estimator, and where the data is."""
    if args.module or args.no_python:
        raise ValueError("A job on SageMaker runs a Python script: leave out `--module` and `--no_python`.")
    if not str(args.training_script).endswith(".py"):
        raise ValueError(f"A job on SageMaker runs a Python script, but {args.training_script!r} is not one.")
    script = Path(args.training_script)
    values = argparse.Namespace(**{**vars(args), **(config.dynamo_config or {})})
    values.mixed_precision = values.mixed_precision or config.mixed_precision
    metrics = _table(config.sagemaker_metrics_file, "metrics")
    arguments = {
        "image_uri": config.image_uri,
        "entry_point": script.name,
        "source_dir": str(script.parent),
        "role": config.iam_role_name,
        "transformers_version": config.transformers_version,
        "pytorch_version": config.pytorch_version,
        "py_version": config.py_version,
        "base_job_name": config.base_job_name,
        "instance_count": config.num_machines,
        "instance_type": config.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": _DISTRIBUTION if config.distributed_type == SageMakerDistributedType.DATA_PARALLEL else None,
        "hyperparameters": hyperparameters(args.training_script_args),
        "environment": {
            "ACCELERATE_USE_SAGEMAKER": "true",
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": str(config.distributed_type.value),
            **variables(values, Accelerators("cpu", 0, "")),
        },
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in metrics] or None,
        **(config.additional_args or {}),
    }
    return arguments, dict(_table(config.sagemaker_inputs_file, "inputs")) or None


def hyperparameters(words: list[str]) -> dict[str, Any]:
    """`--lr 1e-3 --name x` as names and values; SageMaker knows no flags without a value."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        name = rest.pop(0)
        if not name.startswith("-") or not rest or rest[0].startswith("--"):
            raise ValueError(f"SageMaker wants a value after every flag of a script: look at {name!r}.")
        found[name.lstrip("-").replace("-", "_")] = _value(rest.pop(0))
    return found


def _value(word: str) -> Any:
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return bool(str_to_bool(word)) if word.lower() in ("true", "false") else word


def _table(path: str | None, what: str) -> list[tuple[str, str]]:
    """The rows of a file with two columns and a heading, separated by tabs."""
    if path is None:
        return []
    rows = [line.split("\t") for line in Path(path).expanduser().read_text().splitlines()[1:] if line]
    if any(len(row) != 2 for row in rows):
        raise ValueError(f"Each line of the {what} file {path} should have two columns with a tab between them.")
    return [(row[0], row[1]) for row in rows]


def _plan(settings: Settings) -> LaunchPlan:
    return LaunchPlan(
        "Amazon SageMaker",
        single.command(settings),
        variables(settings, settings.devices),
        refused=(
            "sending a job to Amazon SageMaker",
            f"use the SageMaker SDK, or another config file than {settings.config_file}.",
        ),
    )


ENGINE = LaunchEngine(matches=lambda settings: isinstance(settings.file, SageMakerConfig), plan=_plan)
