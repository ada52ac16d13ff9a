"""`accelerate config default`, `accelerate config update`, and the functions behind them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import yaml

from accelerate.commands.accelerate_cli import get_parser
from accelerate.commands.config import default_command_parser, load_config_from_file
from accelerate.commands.config.default import basic_config, write_basic_config
from accelerate.commands.config.update import update_config
from accelerate.config.file import ClusterConfig
from accelerate.launch.machine import Accelerators


def run(*words: str) -> None:
    args = get_parser().parse_args(["config", *words])
    args.func(args)


def test_default_writes_a_file_that_launch_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "config.yaml"
    run("default", "--config_file", str(path), "--mixed_precision", "bf16")
    assert f"Written to {path}." in capsys.readouterr().out
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert config.mixed_precision == "bf16"


def test_the_file_may_be_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = tmp_path / "config.yaml"
    run("--config_file", str(path), "default")
    assert load_config_from_file(path).mixed_precision == "no"
    path.write_text("num_processes: 7\n")
    run("--config_file", str(path), "update")
    assert "distributed_type" in path.read_text()
    assert not (tmp_path / "home").exists()


def test_default_leaves_a_file_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 7\n")
    run("default", "--config_file", str(path))
    assert "exists already and is left unchanged" in capsys.readouterr().out
    assert path.read_text() == "num_processes: 7\n"


def test_write_basic_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert write_basic_config(save_location=str(path)) == path
    assert write_basic_config(save_location=str(path)) is False
    with pytest.raises(ValueError, match="should be one of no, fp16, bf16, fp8, not 'fp17'"):
        write_basic_config("fp17", save_location=str(tmp_path / "other.json"))


@pytest.mark.parametrize(
    ("kind", "count", "label", "processes"),
    [("cpu", 0, "NO", 1), ("cuda", 1, "NO", 1), ("cuda", 4, "MULTI_GPU", 4), ("npu", 8, "MULTI_NPU", 8)],
)
def test_basic_config_follows_the_devices(kind: str, count: int, label: str, processes: int) -> None:
    config = basic_config("no", Accelerators(kind, count, ""))
    assert (config.distributed_type.value, config.num_processes, config.use_cpu) == (label, processes, count == 0)


def test_update_rewrites_and_says_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2\ndynamo_backend: INDUCTOR\n")
    run("update", "--config_file", str(path))
    out = capsys.readouterr().out
    assert "`fp16` is now `mixed_precision: fp16`" in out
    assert "`dynamo_backend` is now part of `dynamo_config`" in out
    content = yaml.safe_load(path.read_text())
    assert content["mixed_precision"] == "fp16"
    assert content["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    assert "fp16" not in content
    assert update_config(argparse.Namespace(config_file=str(path))) == str(path)
    assert yaml.safe_load(path.read_text()) == content


def test_update_of_a_file_with_unknown_keys_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: 'NO'\nnonsense: 1\n")
    with pytest.raises(SystemExit, match="unknown keys: nonsense"):
        run("update", "--config_file", str(path))
    assert path.read_text() == "distributed_type: 'NO'\nnonsense: 1\n"


def test_update_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ValueError, match=r"There is no config file .*none\.yaml to update"):
        update_config(argparse.Namespace(config_file=str(path)))
    with pytest.raises(SystemExit, match="There is no config file"):
        run("update", "--config_file", str(path))
    assert not path.exists()


def test_the_default_place_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.commands.config as config
    from accelerate.commands.config import config_args

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    expected = os.path.join(tmp_path, "accelerate", "default_config.yaml")
    assert config.default_config_file == expected
    assert config_args.default_yaml_config_file == expected
    parser = argparse.ArgumentParser()
    default = default_command_parser(parser.add_subparsers(), [])
    assert default.parse_args([]).config_file == expected
