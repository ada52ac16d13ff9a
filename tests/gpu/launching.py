"""What a launch finds out about GPUs without torch, and what it tells the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from accelerate.launch import machine
from tests.gpu.checks import check

SCRIPT = """
import json, os
from accelerate import Accelerator
accelerator = Accelerator()
about = [accelerator.num_processes, str(accelerator.device), accelerator.mixed_precision, os.environ.get("RANK")]
print("RESULT", json.dumps(about))
accelerator.end_training()
"""


def launch(*words: str, **env: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *words, str(script)],
            env={**os.environ, "HF_HOME": folder, **env},
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@check
def gpus_are_counted_without_torch() -> None:
    assert machine.accelerators(os.environ).count == torch.cuda.device_count()
    assert machine.accelerators(os.environ).kind == "cuda"
    assert machine.accelerators({**os.environ, "CUDA_VISIBLE_DEVICES": ""}).count == 0
    best, reason = machine.best_precision(machine.accelerators(os.environ))
    assert best == ("bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp16"), reason


@check
def a_launch_uses_the_gpu() -> None:
    assert launch("--num_processes", "1", "--mixed_precision", "bf16")[1:3] == ["cuda", "bf16"]
    assert launch("--num_processes", "1", "--gpu_ids", "0")[1] == "cuda"
    assert launch("--cpu")[1] == "cpu"
    # Through torch elastic, as scripts that want a process group on one GPU are started.
    assert launch("--multi_gpu", "--num_processes", "1", "--main_process_port", "0")[1:] == ["cuda:0", "no", "0"]
