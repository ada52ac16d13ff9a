"""Every config template is read, and says to the processes what its first line promises."""

from __future__ import annotations

import pytest

from accelerate.commands.accelerate_cli import main
from accelerate.commands.config import load_config_from_file
from tests.examples.running import EXAMPLES
from tests.harness.world import free_port

FOLDER = EXAMPLES / "configs"
# What `accelerate launch --dry_run` shows, for each of them.
SHOWN = {
    "compile": ["ACCELERATE_DYNAMO_BACKEND=INDUCTOR", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=True"],
    "cpu": ["Plan: 2 processes, on the CPU", "ACCELERATE_USE_CPU=True"],
    "deepspeed_own_file": ["ACCELERATE_DEEPSPEED_CONFIG_FILE=examples/configs/deepspeed_own_file.json"],
    "deepspeed_zero2": ["Plan: 4 processes", "ACCELERATE_DEEPSPEED_ZERO_STAGE=2"],
    "deepspeed_zero3": ["Plan: 8 processes", "ACCELERATE_DEEPSPEED_ZERO_STAGE=3"],
    "deepspeed_zero3_offload": ["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=cpu"],
    "fp8": ["ACCELERATE_MIXED_PRECISION=fp8", "ACCELERATE_FP8_BACKEND=ao", "ACCELERATE_FP8_RECIPE=tensorwise"],
    "fsdp1": ["ACCELERATE_USE_FSDP=true", "FSDP_VERSION=1", "FSDP_SHARDING_STRATEGY=FULL_SHARD"],
    "fsdp2": ["ACCELERATE_USE_FSDP=true", "FSDP_VERSION=2", "FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP"],
    "fsdp2_copies": ["4 processes on each of 2 machines", "FSDP_VERSION=2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2"],
    "fsdp2_long_sequences": ["FSDP_VERSION=2", "PARALLELISM_CONFIG_CP_SIZE=4"],
    "fsdp2_offload": ["FSDP_OFFLOAD_PARAMS=true", "FSDP_ACTIVATION_CHECKPOINTING=true"],
    "fsdp2_tensor_parallel": ["PARALLELISM_CONFIG_DP_SHARD_SIZE=4", "PARALLELISM_CONFIG_TP_SIZE=2"],
    "machines_without_ranks": ["4 processes on each of 2 machines", "--rdzv_backend=c10d"],
    "mpirun": ["mpirun", "ACCELERATE_USE_CPU=True"],
    "one_gpu": ["Plan: one process", "ACCELERATE_MIXED_PRECISION=bf16"],
    "several_gpus": ["Plan: 4 processes", "ACCELERATE_MIXED_PRECISION=bf16"],
    "several_machines": ["4 processes on each of 2 machines", "--rdzv_endpoint=10.0.0.1:"],
}


def test_all_of_them_are_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_would_be_launched(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = FOLDER / f"{name}.yaml"
    assert path.read_text().startswith("# ")
    assert load_config_from_file(str(path)).unknown_in_sections() == []
    monkeypatch.chdir(EXAMPLES.parent)
    script = str(EXAMPLES / "quickstart.py")
    # Another port than the file's, where somebody may be listening now, which would be said.
    words = ["--config_file", str(path), "--main_process_port", str(free_port()), script]
    monkeypatch.setattr("sys.argv", ["accelerate", "launch", "--dry_run", *words])
    main()
    shown = capsys.readouterr().out
    assert [part for part in SHOWN[name] if part not in shown] == [], shown
