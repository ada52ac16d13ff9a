"""`notebook_launcher` with a function that trains with DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

NOTEBOOK = """
import sys, torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import DeepSpeedPlugin

def train():
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    rank, size = accelerator.process_index, accelerator.num_processes
    sys.stdout.write(f"TRAINED {rank} {size} {accelerator.distributed_type.value}\\n")
    sys.stdout.flush()
    accelerator.end_training()

if __name__ == "__main__":
    notebook_launcher(train, num_processes=int(sys.argv[1]), use_port="0", start_method=sys.argv[2])
"""


@pytest.mark.parametrize(("processes", "method"), [(1, "fork"), (2, "fork"), (2, "spawn")])
def test_a_function_trains(tmp_path: Path, processes: int, method: str) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    words = [sys.executable, "notebook.py", str(processes), method]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("TRAINED"))
    assert said == [f"TRAINED {rank} {processes} DEEPSPEED" for rank in range(processes)]
