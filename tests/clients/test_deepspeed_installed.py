"""Where DeepSpeed is merely installed: transformers then imports from `accelerate.utils.deepspeed`, used or not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = """
import sys
import transformers.integrations.deepspeed as integration
assert integration.is_deepspeed_available()
from accelerate.utils.deepspeed import HfDeepSpeedConfig
assert issubclass(integration.HfDeepSpeedConfig, HfDeepSpeedConfig)
import {module}
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with what asking for DeepSpeed finds, and nothing behind it; where there is the real one, that."""
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    if importlib.util.find_spec("deepspeed") is None:
        (tmp_path / "deepspeed").mkdir()
        (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.8'\n")
        about = tmp_path / "deepspeed-0.19.8.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
        environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [environ.get("PYTHONPATH")])])
    return environ


@pytest.mark.parametrize("module", ["transformers.trainer", "peft", "trl.trainer.sft_trainer", "diffusers"])
def test_clients_import_beside_it(module: str, environ: dict[str, str]) -> None:
    pytest.importorskip(module.split(".")[0], reason=f"needs {module.split('.')[0]}: make clients")
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS.format(module=module)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


def test_a_trainer_says_what_is_wrong(environ: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: make clients")
    if importlib.util.find_spec("deepspeed") is not None:
        pytest.skip("needs an environment without DeepSpeed: make clients")
    code = f"""
import torch
from transformers import Trainer, TrainingArguments
config = {{"zero_optimization": {{"stage": 2}}, "train_micro_batch_size_per_gpu": "auto"}}
arguments = TrainingArguments({str(tmp_path)!r}, use_cpu=True, report_to=[], deepspeed=config)
assert arguments.deepspeed_plugin.zero_stage == 2
Trainer(torch.nn.Linear(1, 1), arguments)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert result.returncode != 0
    assert "DeepSpeed is installed but cannot be imported (ModuleNotFoundError: " in result.stderr, result.stderr
