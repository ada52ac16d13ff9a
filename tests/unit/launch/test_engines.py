"""Engines: how each MPI is told, what a SageMaker job is given, and the public functions for programs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.config.enums import ComputeEnvironment, SageMakerDistributedType
from accelerate.config.file import SageMakerConfig
from accelerate.launch.engines import mpi
from accelerate.launch.engines.sagemaker import hyperparameters
from accelerate.launch.machine import Accelerators
from accelerate.launch.resolve import resolve
from accelerate.utils import launch as public


def parsed(*words: str) -> argparse.Namespace:
    return launch_command_parser().parse_args([*words, "x.py", "--lr", "1"])


@pytest.fixture(autouse=True)
def no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("version", "beginning"),
    [
        (
            "mpirun (Open MPI) 4.1.4\n",
            ["mpirun", "--hostfile", "h", "--npernode", "2", "-n", "4", "--bind-to", "socket"],
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", ["mpirun", "-f", "h", "-ppn", "2", "-n", "4"]),
        ("HYDRA build details:\n Version: 3.3", ["mpirun", "-f", "h", "-ppn", "2", "-n", "4"]),
    ],
)
def test_each_mpi_is_told_in_its_words(version: str, beginning: list[str]) -> None:
    words = ["--cpu", "--mpirun_hostfile", "h", "--num_processes", "4", "--num_machines", "2", "--main_process_ip", "a"]
    settings = resolve(parsed(*words), {"HF_HOME": "/nowhere"}, Accelerators("cpu", 0, ""), lambda port: False)
    command = mpi.command(settings, mpi.flavour(version), {"NAME": "value"})
    passed = ["-x", "NAME"] if "Open" in version else ["-genv", "NAME", "value"]
    assert command[: len(beginning) + len(passed)] == beginning + passed
    assert command[-3:] == ["x.py", "--lr", "1"]


def test_an_unknown_mpi_is_named() -> None:
    with pytest.raises(ValueError, match=r"'Some MPI 1\.0', which is none of Open MPI"):
        mpi.flavour("Some MPI 1.0")


def test_hyperparameters() -> None:
    words = ["--lr", "1e-3", "--name", "a b", "--n", "3", "--flag", "False", "-x", "-1"]
    expected = {"lr": 0.001, "name": "a b", "n": 3, "flag": False, "x": -1}
    assert hyperparameters(words) == public._convert_nargs_to_dict(words) == expected
    with pytest.raises(ValueError, match="look at '--flag'"):
        hyperparameters(["--flag", "--other", "1"])


def test_a_sagemaker_job() -> None:
    config = SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=SageMakerDistributedType.DATA_PARALLEL,
        mixed_precision="fp16",
        use_cpu=False,
        debug=False,
        ec2_instance_type="ml.p3.2xlarge",
        iam_role_name="role",
        num_machines=2,
        dynamo_config={"dynamo_backend": "INDUCTOR"},
        additional_args={"max_run": 5},
    )
    args = launch_command_parser().parse_args(["scripts/x.py", "--lr", "1e-3"])
    job, inputs = public.prepare_sagemager_args_inputs(config, args)
    assert inputs is None
    assert (job["source_dir"], job["entry_point"], job["instance_count"], job["max_run"]) == ("scripts", "x.py", 2, 5)
    assert job["hyperparameters"] == {"lr": 0.001}
    assert job["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    environment = job["environment"]
    assert environment["ACCELERATE_USE_SAGEMAKER"] == "true"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"


def test_commands_and_environments_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "1")
    command, env = public.prepare_simple_launcher_cmd_env(parsed("--mixed_precision", "bf16", "--cpu"))
    assert command[1:] == ["x.py", "--lr", "1"]
    assert (env["MINE"], env["ACCELERATE_MIXED_PRECISION"], env["ACCELERATE_USE_CPU"]) == ("1", "bf16", "True")
    env = public.prepare_multi_gpu_env(parsed("--use_fsdp", "--num_processes", "2", "--main_process_port", "0"))
    assert (env["MINE"], env["ACCELERATE_USE_FSDP"], env["FSDP_VERSION"]) == ("1", "true", "1")
    words = ("--use_deepspeed", "--zero_stage", "2", "--num_processes", "2", "--main_process_port", "0")
    none, env = public.prepare_deepspeed_cmd_env(parsed(*words))
    assert none is None
    assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"


def test_environments_of_what_is_given() -> None:
    given = argparse.Namespace(num_processes=2, num_machines=1, main_process_port=0, mixed_precision="bf16")
    env = public.prepare_multi_gpu_env(given)
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    command, env = public.prepare_deepspeed_cmd_env(given)
    assert command is None and env["ACCELERATE_USE_DEEPSPEED"] == "true"
    given = argparse.Namespace(training_script="x.py", training_script_args=["--lr", "1"], mixed_precision="fp16")
    command, env = public.prepare_simple_launcher_cmd_env(given)
    assert command[1:] == ["x.py", "--lr", "1"] and env["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert public.prepare_tpu(argparse.Namespace(mixed_precision="bf16"), {})[1] == {"XLA_USE_BF16": "1"}
    assert public.setup_fp8_env(argparse.Namespace(), {}) == {}
    assert public.setup_fp8_env(argparse.Namespace(fp8_margin=3), {}) == {"ACCELERATE_FP8_MARGIN": "3"}


def test_environments_that_are_extended() -> None:
    args = parsed("--fp8_backend", "te", "--fp8_margin", "3", "--parallelism_config_tp_size", "2")
    assert public.setup_fp8_env(args, {"A": "1"})["ACCELERATE_FP8_MARGIN"] == "3"
    env = public.prepare_extend_env_parallelism_config(args, {"A": "1"})
    assert (env["A"], env["PARALLELISM_CONFIG_TP_SIZE"]) == ("1", "2")
    args = parsed("--mixed_precision", "bf16", "--downcast_bf16")
    assert public.prepare_tpu(args, {})[1] == {"XLA_DOWNCAST_BF16": "1"}
    assert public.prepare_tpu(parsed("--mixed_precision", "bf16"), {})[1] == {"XLA_USE_BF16": "1"}


def test_paths_are_added_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACES", "a:b")
    assert public.env_var_path_add("PLACES", "c") == "a:b:c"
    monkeypatch.delenv("PLACES")
    assert public.env_var_path_add("PLACES", "c") == "c"


def test_all_settings_as_a_namespace() -> None:
    args, file, from_file = _validate_launch_command(
        parsed("--cpu", "--num_processes", "2", "--main_process_port", "0")
    )
    assert (args.num_processes, args.use_cpu, args.num_machines, args.mixed_precision) == (2, True, 1, "no")
    assert file is None
    assert not from_file
