"""`accelerate config` in a real terminal, driven by keys."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.unit.commands.terminal import CONTROL_C, DOWN, ENTER, ESCAPE, UP, Terminal

COMMAND = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "HF_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}


def written(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((folder / "accelerate" / "default_config.yaml").read_text())
    return content


def test_enter_all_the_way_gives_what_was_detected(tmp_path: Path) -> None:
    terminal = Terminal(COMMAND, environment(tmp_path))
    terminal.wait_for("Where will the training run?")
    terminal.send(ENTER)
    assert "no GPU" not in terminal.wait_for("What will it run on?")
    terminal.wait_for(" (no GPU: ")  # the reason of the suggestion stands behind its question
    terminal.send(ENTER)
    terminal.wait_for("Run on the CPU")
    terminal.send("n")
    terminal.wait_for("Use DeepSpeed")
    terminal.send(ESCAPE)  # back to the question before, where the answer is the suggestion now
    terminal.wait_for("(y/N)")
    terminal.send("y")
    terminal.wait_for("Which number format")
    terminal.send(ENTER)
    terminal.wait_for("torch.compile?")
    terminal.send(ENTER)
    terminal.wait_for("Your answers")
    assert terminal.end() == 0
    table = terminal.shown.split("Your answers")[1]
    assert "tpu" not in table and "downcast_bf16" not in table and "use_cpu" in table
    assert "Written to" in terminal.shown
    assert written(tmp_path)["distributed_type"] == "NO"
    assert written(tmp_path)["use_cpu"] is True
    assert written(tmp_path)["num_processes"] == 1


def test_every_answer_that_esc_takes_back_is_suggested_again(tmp_path: Path) -> None:
    terminal = Terminal(COMMAND, environment(tmp_path))
    terminal.wait_for("Where will the training run?")
    terminal.send(ENTER)
    terminal.wait_for("What will it run on?")
    terminal.send(DOWN + ENTER)
    terminal.wait_for("How many machines")
    terminal.send(ESCAPE)
    terminal.wait_for("What will it run on?")
    terminal.send(ESCAPE)
    for question in ("Where will the training run?", "What will it run on?", "How many machines"):
        terminal.wait_for(question)
        terminal.send(ENTER)
    terminal.wait_for("How is the model spread")
    assert terminal.shown.count("? What will it run on? MULTI_CPU\n") == 2
    terminal.send(CONTROL_C)
    terminal.end()


def test_arrows_choose_several_processes_and_wrong_numbers_are_asked_again(tmp_path: Path) -> None:
    terminal = Terminal(COMMAND, environment(tmp_path))
    terminal.wait_for("Where will the training run?")
    terminal.send(ENTER)
    terminal.wait_for("What will it run on?")
    terminal.wait_for("several processes on CPUs")  # each answer is explained
    terminal.send(DOWN + ENTER)
    terminal.wait_for("How many machines")
    terminal.send(ENTER)
    terminal.wait_for("How is the model spread")
    terminal.send(ENTER)
    terminal.wait_for("How many processes")
    terminal.send("x" + ENTER)
    terminal.wait_for("should be a whole number")
    terminal.send("\x7f\x7f3" + ENTER)
    terminal.wait_for("mpirun?")
    terminal.send(ENTER)
    terminal.wait_for("Which number format")
    terminal.send(DOWN + DOWN + ENTER)
    terminal.wait_for("torch.compile?")
    terminal.send("y")
    terminal.wait_for("Which compiler?")
    terminal.send(ENTER)
    terminal.wait_for("Change how it compiles?")
    terminal.send(ENTER)
    terminal.wait_for("before each collective")
    terminal.send("y")
    assert terminal.end() == 0
    config = written(tmp_path)
    assert config["distributed_type"] == "MULTI_CPU"
    assert config["num_processes"] == 3
    assert config["mixed_precision"] == "bf16"
    assert config["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    assert config["debug"] is True
    assert "? What will it run on? MULTI_CPU\n" in terminal.shown  # without its explanation

    # The second time, Enter repeats every answer.
    terminal = Terminal(COMMAND, environment(tmp_path))
    terminal.wait_for("exists: its answers are the suggestions")
    questions = ["training run?", "it run on?", "How many machines", "model spread", "How many processes", "mpirun?"]
    questions += ["Which number format", "torch.compile?", "Which compiler?", "Change how", "before each collective"]
    for question in questions:
        terminal.wait_for(question)
        terminal.send(ENTER)
    assert terminal.end() == 0, terminal.shown
    assert written(tmp_path) == config


def test_other_hardware_than_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n")
    terminal = Terminal(COMMAND, environment(tmp_path))
    terminal.wait_for("Where will the training run?")
    terminal.send(ENTER)
    terminal.wait_for("What will it run on? (from the file)")
    terminal.send(DOWN + ENTER)
    terminal.wait_for("How many machines")
    terminal.send(ENTER)
    terminal.wait_for("How is the model spread")
    terminal.send(ENTER)
    terminal.wait_for("How many processes")
    assert "from the file" not in terminal.wait_for("(two on each machine, to begin with) 2")
    terminal.send(ENTER)
    terminal.wait_for("mpirun?")
    terminal.send(CONTROL_C)
    terminal.end()


def test_what_is_written_elsewhere_has_to_be_named(tmp_path: Path) -> None:
    path = tmp_path / "my other.yaml"
    terminal = Terminal([*COMMAND, "--config_file", str(path)], environment(tmp_path))
    other = shlex.quote(str(path))  # as a shell takes it
    for question in ("training run?", "it run on?", "Run on the CPU", "Which number format", "torch.compile?"):
        terminal.wait_for(question)
        terminal.send(ENTER)
    terminal.wait_for(f"`accelerate launch --config_file {other}` uses it")
    assert terminal.end() == 0
    # A line for each command, which a terminal need not break in the middle of it.
    assert f"\n`accelerate test --config_file {other}` tries it out.\n" in terminal.shown


def test_fsdp(tmp_path: Path) -> None:
    terminal = Terminal(COMMAND, environment(tmp_path))
    terminal.wait_for("Where will the training run?")
    terminal.send(ENTER)
    terminal.wait_for("What will it run on?")
    terminal.send(DOWN + DOWN + ENTER)
    answers = {
        "How many machines": "",
        "How is the model spread": DOWN,
        "Which version of FSDP?": "",
        "Free gathered parameters": "n",
        "Keep parameters and gradients on the CPU": "y",
        "What makes a unit?": "",
        "Which layer classes": "Block",
        "How should checkpoints be written?": "",
        "Let only rank 0 load": "n",
        "Recompute activations": "y",
        "Combine sharding": "n",
        "How many processes": "",
        "Which GPUs": "",
        "closest to its GPU?": "n",
        "Which number format": "",
        "torch.compile?": "n",
        "before each collective": "n",
    }
    for question, keys in answers.items():
        terminal.wait_for(question)
        terminal.send(keys if keys in ("y", "n") else keys + ENTER)
    assert terminal.end() == 0, terminal.shown
    config = written(tmp_path)
    assert config["distributed_type"] == "FSDP"
    assert config["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_activation_checkpointing": True,
    }


def answered(folder: Path, answers: list[tuple[str, str]]) -> dict[str, Any]:
    """What is written after these answers; keys that are no yes or no end with Enter."""
    terminal = Terminal(COMMAND, environment(folder))
    for question, keys in answers:
        terminal.wait_for(question)
        terminal.send(keys if keys in ("y", "n") else keys + ENTER)
    assert terminal.end() == 0, terminal.shown
    return written(folder)


BEGINNING = [("Where will the training run?", ""), ("What will it run on?", DOWN + DOWN)]
REST = [
    ("How many processes", "\x7f4"),
    ("Which GPUs", ""),
    ("closest to its GPU?", "n"),
    ("torch.compile?", "n"),
    ("before each collective", "n"),
]
WITH_PRECISION = [*REST[:3], ("Which number format", ""), *REST[3:]]


def test_deepspeed_on_two_machines(tmp_path: Path) -> None:
    config = answered(
        tmp_path,
        [
            *BEGINNING,
            ("How many machines", "\x7f2"),
            ("Which machine is this", ""),
            ("the address of the machine", ""),
            ("It is needed", "10.0.0.1"),
            ("At which port", ""),
            ("reach each other directly", "y"),
            ("find each other", ""),
            ("How is the model spread", DOWN + DOWN),
            ("Is there a DeepSpeed config file?", "n"),
            ("What should be sharded?", DOWN),
            ("Where should optimizer states live?", DOWN),
            ("Where should parameters live?", DOWN + DOWN),
            ("On which disk do parameters go?", ""),
            ("How many micro-batches make a step?", "\x7f4"),
            ("the largest norm of the gradients?", "1.0"),
            ("Gather 16-bit weights when saving?", "y"),
            ("Shard models while they are built?", "y"),
            ("layers of experts", "y"),
            ("Which layer classes are mixtures of experts", "MoeBlock"),
            ("What starts the other machines?", ""),
            ("Which file lists the machines", ""),
            ("Which machines and devices of it?", DOWN),
            ("are left out", "b:0"),
            *WITH_PRECISION,
        ],
    )
    assert config["distributed_type"] == "DEEPSPEED"
    assert (config["num_machines"], config["num_processes"]) == (2, 4)
    assert config["deepspeed_config"] == {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/nvme",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero3_save_16bit_model": True,
        "zero3_init_flag": True,
        "deepspeed_moe_layer_cls_names": "MoeBlock",
        "deepspeed_multinode_launcher": "pdsh",
        "deepspeed_hostfile": "hostfile",
        "deepspeed_exclusion_filter": "b:0",
    }


def test_deepspeed_with_a_file_of_its_own(tmp_path: Path) -> None:
    config = answered(
        tmp_path,
        [
            *BEGINNING,
            ("How many machines", ""),
            ("How is the model spread", DOWN + DOWN),
            ("Is there a DeepSpeed config file?", "y"),
            ("Where is it?", "\x7f\x7f\x7f\x7fds.json"),
            ("Shard models while they are built?", "n"),
            ("layers of experts", "n"),
            *REST,  # without a question about the precision, which that file says
        ],
    )
    assert config["deepspeed_config"] == {"deepspeed_config_file": "ds.json", "zero3_init_flag": False}
    assert "mixed_precision" not in config


def test_deepspeed_on_one_gpu(tmp_path: Path) -> None:
    config = answered(
        tmp_path,
        [
            ("Where will the training run?", ""),
            ("What will it run on?", ""),
            ("Run on the CPU", "n"),
            ("Use DeepSpeed", "y"),
            ("Is there a DeepSpeed config file?", "n"),
            ("What should be sharded?", ""),
            ("Where should optimizer states live?", DOWN),
            ("Where should parameters live?", ""),
            ("How many micro-batches make a step?", ""),
            ("the largest norm of the gradients?", ""),
            ("layers of experts", "n"),
            ("Which number format", ""),
            ("torch.compile?", "n"),
        ],
    )
    assert (config["distributed_type"], config["num_processes"]) == ("DEEPSPEED", 1)
    assert config["deepspeed_config"] == {
        "zero_stage": 2,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 1,
        "zero3_init_flag": False,
    }


def test_control_c_writes_nothing(tmp_path: Path) -> None:
    terminal = Terminal(COMMAND, environment(tmp_path))
    terminal.wait_for("Where will the training run?")
    terminal.send(CONTROL_C)
    assert terminal.end() == 130
    assert "Nothing was written." in terminal.shown
    assert not (tmp_path / "accelerate").exists()


def test_without_a_terminal_the_way_out_is_named(tmp_path: Path) -> None:
    done = subprocess.run(COMMAND, env=environment(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1
    assert "`accelerate config default`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pod(tmp_path: Path) -> None:
    terminal = Terminal(COMMAND, environment(tmp_path))
    terminal.wait_for("Where will the training run?")
    terminal.send(ENTER)
    terminal.wait_for("What will it run on?")
    terminal.send(UP + ENTER)  # from the first to the last
    answers = {
        "Is it a pod": "y",
        "name of the pod": "mine",
        "which zone": "there",
        "with sudo": "n",
        "Which number format": DOWN + DOWN,
        "parameters in bf16": "y",
        "torch.compile?": "n",
    }
    for question, answer in answers.items():
        terminal.wait_for(question)
        terminal.send(answer if answer in ("y", "n") else answer + ENTER)
    assert terminal.end() == 0, terminal.shown
    config = written(tmp_path)
    assert config["distributed_type"] == "XLA" and config["mixed_precision"] == "bf16" and config["downcast_bf16"]
    assert (config["tpu_use_cluster"], config["tpu_name"], config["tpu_zone"]) == (True, "mine", "there")
    launch = [*COMMAND[:-1], "launch", "--dry_run", "x.py"]
    plan = subprocess.run(launch, env=environment(tmp_path), capture_output=True, text=True, check=True).stdout
    remote = "accelerate launch --tpu --mixed_precision bf16 --downcast_bf16 x.py"
    assert f"gcloud compute tpus tpu-vm ssh mine --zone there --worker all --command '{remote}'" in plan
