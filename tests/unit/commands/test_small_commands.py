"""`accelerate to-fsdp2`, `tpu-config` and `merge-weights`."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file

import accelerate
from accelerate.commands.merge import merge_command, merge_command_parser
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2, to_fsdp2_command, to_fsdp2_command_parser
from accelerate.commands.tpu import tpu_command_launcher, tpu_command_parser
from accelerate.errors import CheckpointError

FSDP1 = {
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_use_orig_params": True,
    },
}
FSDP2 = {
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    },
}


def to_fsdp2(*words: str) -> None:
    to_fsdp2_command(to_fsdp2_command_parser().parse_args([*words]))


def test_a_config_for_fsdp1_becomes_one_for_fsdp2(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(yaml.safe_dump(FSDP1))
    with caplog.at_level(logging.WARNING, logger="accelerate.commands.to_fsdp2"):
        to_fsdp2("--config_file", str(old), "--output_file", str(new))
    assert yaml.safe_load(new.read_text()) == FSDP2
    assert yaml.safe_load(old.read_text()) == FSDP1
    left_out = [record.message.split()[0] for record in caplog.records]
    assert left_out == ["fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params"]
    to_fsdp2("--config_file", str(old), "--overwrite")
    assert yaml.safe_load(old.read_text()) == FSDP2


def test_a_config_in_json_stays_json_and_old_names_are_understood(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    fsdp = {"fsdp_backward_prefetch_policy": "BACKWARD_PRE", "fsdp_sharding_strategy": 2}
    old.write_text(json.dumps({"fsdp_config": fsdp}))
    to_fsdp2("--config_file", str(old), "--output_file", str(new))
    assert json.loads(new.read_text()) == {"fsdp_config": {"fsdp_reshard_after_forward": False, "fsdp_version": 2}}


@pytest.mark.parametrize(
    ("strategy", "reshard"),
    [("FULL_SHARD", True), (1, True), ("2", False), ("HYBRID_SHARD", True), ("NO_SHARD", False)],
)
def test_strategies(strategy: Any, reshard: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="accelerate.commands.to_fsdp2"):
        converted = convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": strategy}})
    assert converted["fsdp_config"] == {"fsdp_reshard_after_forward": reshard, "fsdp_version": 2}
    assert ("parallelism_config_dp_replicate_size" in caplog.text) == (strategy == "HYBRID_SHARD")


def test_what_needs_no_conversion_stays(caplog: pytest.LogCaptureFixture) -> None:
    assert convert_config_to_fsdp2(FSDP2) is FSDP2
    assert "for FSDP2 already" in caplog.text
    plain = {"mixed_precision": "no"}
    assert convert_config_to_fsdp2(plain) is plain


def test_only_what_was_converted_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("mixed_precision: 'no'\n")
    to_fsdp2("--config_file", str(old), "--output_file", str(new))
    assert not new.exists()
    old.write_text("fsdp_config: {fsdp_version: 1}\n")
    to_fsdp2("--config_file", str(old), "--output_file", str(new))
    assert capsys.readouterr().out == f"Written to {new}.\n" and new.exists()


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        (["--config_file", "none.yaml", "--overwrite"], FileNotFoundError, "no config file none.yaml"),
        (["--config_file", "there.yaml"], ValueError, "--output_file"),
        (["--config_file", "there.yaml", "--output_file", "there.yaml"], FileExistsError, "exists already"),
    ],
)
def test_bad_files_are_refused(
    words: list[str], kind: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("{}")
    with pytest.raises(kind, match=text):
        to_fsdp2(*words)
    with pytest.raises(ValueError, match="SHARD_ALL"):
        convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_ALL"}})


def tpu(*words: str) -> None:
    tpu_command_launcher(tpu_command_parser().parse_args([*words]))


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: XLA\ntpu_name: pod\ntpu_zone: zone\ncommands: [echo hi, ls]\n")
    return str(config)


SSH = "compute tpus tpu-vm ssh"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], f"gcloud {SSH} pod --zone zone --command cd /usr/share; echo hi; ls --worker all"),
        (["--command", "pwd", "--use_alpha"], f"gcloud alpha {SSH} pod --zone zone --command cd /usr/share; pwd"),
        (
            ["--tpu_name", "other", "--command", "a", "--command", "b"],
            "ssh other --zone zone --command cd /usr/share; a; b",
        ),
        (
            ["--install_accelerate"],
            f'--command cd /usr/share; pip install -U "accelerate>={accelerate.__version__}"; echo hi; ls',
        ),
        (["--install_accelerate", "--accelerate_version", "1.2.0"], "cd /usr/share; pip install accelerate==1.2.0;"),
    ],
)
def test_the_command_for_a_pod(words: list[str], command: str, pod: str, capsys: pytest.CaptureFixture[str]) -> None:
    tpu("--config_file", pod, "--debug", *words)
    shown, pasted = capsys.readouterr().out.splitlines()
    assert command in shown and shown.startswith("Not run")
    assert " ".join(shlex.split(pasted)).endswith(shown.partition(": ")[2])


def test_a_pod_is_run_by_gcloud(pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "gcloud"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit $CODE\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (tmp_path / "commands").write_text("echo one\n\necho two\n")
    monkeypatch.setenv("CODE", "0")
    tpu("--config_file", pod, "--command_file", str(tmp_path / "commands"))
    assert "cd /usr/share; echo one; echo two" in (tmp_path / "asked").read_text()
    monkeypatch.setenv("CODE", "3")
    with pytest.raises(RuntimeError, match="ended with code 3"):
        tpu("--config_file", pod)


def test_a_pod_without_a_name_or_work_is_refused(pod: str) -> None:
    with pytest.raises(ValueError, match="--tpu_name and --tpu_zone"):
        tpu("--command", "ls", "--debug")
    with pytest.raises(ValueError, match="nothing to run"):
        tpu("--tpu_name", "a", "--tpu_zone", "b", "--debug")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # said by torch where no processes were asked for
def test_merge_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"model": {"a": torch.arange(3)}}, checkpoint_id=tmp_path / "shards")
    words = [str(tmp_path / "shards"), str(tmp_path / "out"), "--remove_checkpoint_dir"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file: give the folder in which the weights are to be"):
        merge_command(merge_command_parser().parse_args([words[0], str(tmp_path / "file")]))
    merge_command(merge_command_parser().parse_args(words))
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [0, 1, 2]
    assert not (tmp_path / "shards").exists() and str(tmp_path / "out") in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"needs no merging: .* in model\.safetensors\."):
        merge_command(merge_command_parser().parse_args([str(tmp_path / "out"), str(tmp_path / "again")]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "pytorch_model_fsdp.bin").touch()  # written with FULL_STATE_DICT
    with pytest.raises(ValueError, match=r"needs no merging: .* in pytorch_model_fsdp\.bin\."):
        merge_command(merge_command_parser().parse_args([str(tmp_path / "full"), str(tmp_path / "again")]))
