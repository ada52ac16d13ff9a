"""Scripts and functions that several processes run with a device each: by `accelerate launch --tpu`, or a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.world import free_port

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from tests.xla.fakes import several_devices


def train():
    several_devices()
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    accelerator = Accelerator()
    plain = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    accelerator.backward(model(torch.full((2, 2), accelerator.process_index + 1.0, device=accelerator.device)).sum())
    optimizer.step()
    weights = gather_object([model.weight.tolist()])
    where = f"{accelerator.num_processes} on {accelerator.device.type} {accelerator.distributed_type}"
    accelerator.print("trained", where, weights[0] == weights[1], accelerator.mixed_precision)
    accelerator.end_training()
"""
CALLS = {
    "script": "\n\nif __name__ == '__main__':\n    train()\n",
    "function": "",
    "notebook": "\n\nif __name__ == '__main__':\n    from accelerate import notebook_launcher\n"
    "    notebook_launcher(train, num_processes=2, use_port='PORT', mixed_precision='bf16')\n",
}


def run(folder: Path, kind: str, *words: str) -> str:
    script = folder / "train.py"
    port = str(free_port())
    script.write_text(SCRIPT + CALLS[kind].replace("PORT", port))
    launch = ["-m", "accelerate.commands.launch", "--tpu", "--num_processes", "2", "--main_process_port", port]
    command = [sys.executable, *(launch if kind != "notebook" else []), *words, str(script)]
    env = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PJRT_DEVICE": "CPU", "HF_HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "words", "mode"),
    [
        ("script", ["--mixed_precision", "bf16"], "bf16"),
        ("function", ["--main_training_function", "train"], "no"),
        ("notebook", [], "bf16"),
    ],
)
def test_several_processes_train(tmp_path: Path, kind: str, words: list[str], mode: str) -> None:
    output = run(tmp_path, kind, *words)
    assert f"trained 2 on xla DistributedType.XLA True {mode}\n" in output
