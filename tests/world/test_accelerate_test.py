"""`accelerate test`: the script that it launches, on two real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerate.test_utils.scripts import test_script as script


def test_all_that_the_config_says(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    settings = ["distributed_type: MULTI_CPU", "num_processes: 2", "use_cpu: true", "mixed_precision: bf16"]
    config.write_text("\n".join([*settings, "main_process_port: 0", ""]))
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", "--config_file", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = (line for line in done.stdout.splitlines() if not line.startswith("[Gloo]"))  # of torch 2.9
    assert [line.split()[:2] for line in lines] == [["\u2714", check.__name__] for check in script.CHECKS]
    assert "2 x cpu (gloo), MULTI_CPU bf16: 9 of 9 checks passed" in last and f"torch {torch.__version__}" in last


def test_an_engine_whose_config_names_the_layers_of_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    settings = ["distributed_type: FSDP", "num_processes: 2", "use_cpu: true", "main_process_port: 0", "fsdp_config:"]
    layers = ["fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer"]
    config.write_text("\n".join([*settings, *(f"  {line}" for line in ("fsdp_version: 1", *layers)), ""]))
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", "--config_file", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert "2 x cpu (gloo), FSDP no: 9 of 9 checks passed" in done.stdout, done.stdout + done.stderr


def _fails() -> str:
    raise AssertionError("the cable is loose")


def test_a_check_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(script, "CHECKS", (script.randomness, _fails))
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 1
    passed, failed, last = capsys.readouterr().out.splitlines()
    assert "randomness" in passed and "_fails" in failed and "rank 0: AssertionError: the cable is loose" in failed
    assert "1 of 2 checks passed" in last and last.endswith("; failed: _fails")


def test_an_engine_that_one_process_cannot_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(script, "CHECKS", (script.randomness,))
    script.main()
    assert "1 of 1 checks passed" in (last := capsys.readouterr().out.splitlines()[-1])
    assert "; FSDP was not tried, since one process" in last
