"""`--dry_run`: commands, variables, and where each setting came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.available import is_deepspeed_available
from accelerate.commands.launch import launch_command, launch_command_parser
from tests.unit.commands.terminal import Terminal

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--dry_run"]


def environment(folder: Path) -> dict[str, str]:
    (folder / "accelerate").mkdir(exist_ok=True)
    file = {"distributed_type": "FSDP", "num_processes": 2, "use_cpu": True, "fsdp_config": {"fsdp_version": 2}}
    (folder / "accelerate" / "default_config.json").write_text(json.dumps(file))
    return {**os.environ, "HF_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}


def shown(folder: Path, *words: str) -> list[str]:
    done = subprocess.run([*LAUNCH, *words], capture_output=True, text=True, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_plain_text_where_there_is_no_terminal(tmp_path: Path) -> None:
    lines = shown(tmp_path, "--mixed_precision", "bf16", "--main_process_port", "0", "x.py", "a b")
    assert lines[0] == "Plan: 2 processes, on the CPU, with gloo"
    assert f"  {sys.executable} x.py 'a b'" in lines
    assert "  FSDP_VERSION=2" in lines
    assert "  ACCELERATE_MIXED_PRECISION=bf16" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index("Settings") + 1 :] if line.strip()}
    assert rows["mixed_precision"] == ["bf16", "flag"]
    assert rows["num_processes"] == ["2", "file"]
    assert rows["fsdp_version"] == ["2", "file"]
    assert rows["fsdp_offload_params"] == ["false", "default"]
    assert rows["main_process_port"] == ["0", "flag", "any", "that", "is", "free"]
    assert rows["use_fsdp"] == ["yes", "file", "distributed_type", "is", "FSDP"]
    assert "zero_stage" not in rows  # an engine that is not used
    assert not any("\x1b" in line or "starting" in line for line in lines)


def test_a_table_in_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal([*LAUNCH, "--num_processes", "1", "x.py"], environment(tmp_path))
    assert terminal.end() == 0
    assert "setting" in terminal.shown
    assert "why" in terminal.shown
    assert "distributed_type is FSDP" in terminal.shown


def test_a_script_that_is_not_there_is_noted(tmp_path: Path) -> None:
    notes = [line for line in shown(tmp_path, "nowhere.py") if line.startswith("Note: ")]
    assert notes[0].startswith("Note: There is no script nowhere.py")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    text = "\n".join(shown(tmp_path, "--aws_secret_access_key", "hush", "x.py"))
    assert "hush" not in text
    assert "***" in text


def test_what_cannot_be_started_is_shown_with_a_note(tmp_path: Path) -> None:
    lines = shown(tmp_path, "--tpu", "--num_processes", "1", "--mixed_precision", "bf16", "x.py")
    assert lines[0] == "Plan: one process on all chips of a TPU" and "  XLA_USE_BF16=1" in lines
    assert lines[-1].startswith("Note: A TPU needs torch_xla:")


def test_a_launch_by_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    hosts = ["--deepspeed_hostfile", str(tmp_path / "hosts")]
    lines = shown(tmp_path, "--use_deepspeed", "--zero_stage", "3", *hosts, "--num_processes", "4", "x.py", "--lr", "1")
    assert lines[0] == "Plan: 4 processes on 2 machines, by DeepSpeed's pdsh launcher"
    assert any("deepspeed.launcher.runner --hostfile" in line for line in lines)
    assert "  ACCELERATE_DEEPSPEED_ZERO_STAGE=3" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index("Settings") + 1 :] if line.strip()}
    assert rows["zero_stage"] == ["3", "flag"]
    assert rows["num_machines"][:5] == ["2", "detected", "they", "are", "in"]


@pytest.mark.skipif(is_deepspeed_available(), reason="deepspeed is installed")
def test_without_deepspeed_nothing_is_started(tmp_path: Path) -> None:
    said = "DeepSpeed is not installed for"
    assert shown(tmp_path, "--use_deepspeed", "x.py")[-1].startswith(f"Note: {said}")
    launch = [word for word in LAUNCH if word != "--dry_run"]
    env = environment(tmp_path)
    done = subprocess.run([*launch, "--use_deepspeed", "x.py"], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith(f"accelerate launch: {said}")
    args = launch_command_parser().parse_args(["--use_deepspeed", "x.py"])
    with pytest.raises(ImportError, match=said):
        launch_command(args)
