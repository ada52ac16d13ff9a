"""`accelerate env`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import accelerate

CALL = """
import sys
from accelerate.commands.accelerate_cli import main
main()
print('torch' in sys.modules, file=sys.stderr)
"""


def env(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CALL, "env", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=True)


def test_json_says_versions_machine_config_and_why(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    done = env("--json", "--config_file", str(config), ACCELERATE_DEBUG_MODE="1", ACCELERATE_MY_TOKEN="abc")
    facts = json.loads(done.stdout)
    assert done.stderr.strip() == "False", "torch was imported"
    assert facts["Versions"]["accelerate"] == accelerate.__version__ and "torch" in facts["Versions"]
    assert facts["Config"]["file"] == str(config) and facts["Config"]["num_processes"] == 2
    assert "(" in facts["Detected"]["Devices"], "the reason is missing"
    assert facts["Environment"]["ACCELERATE_DEBUG_MODE"] == "1"
    assert "abc" not in done.stdout


def test_deepspeed_is_shown(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n")
    text = env("--config_file", str(config), DS_ACCELERATOR="cpu").stdout
    assert "  deepspeed_config:\n    zero_stage: 3\n" in text
    assert "  DS_ACCELERATOR: cpu\n" in text


def test_text_without_a_config_and_with_a_bad_one(tmp_path: Path) -> None:
    text = env(HF_HOME=str(tmp_path)).stdout
    assert f"accelerate: {accelerate.__version__}" in text
    assert f"{tmp_path / 'accelerate' / 'default_config.yaml'} (there is none" in text
    # A launch with a file that is named but not there is an error, so this does not promise that it goes without.
    named = env("--config_file", str(tmp_path / "nope.yaml")).stdout
    assert f"  error: There is no config file {tmp_path / 'nope.yaml'}: " in named
    assert "there is none" not in named
    bad = tmp_path / "bad.yaml"
    bad.write_text("no_such_key: 1\n")
    assert "no_such_key" in env("--config_file", str(bad)).stdout
