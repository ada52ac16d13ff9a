"""Notebooks, the commands that look at a machine, and the estimate of memory, on a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu.checks import check, reset

# Two processes share the GPU of the machine, so they talk through gloo.
TRAIN = """
import sys, torch
from accelerate import Accelerator, InitProcessGroupKwargs, notebook_launcher

def train(name):
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    x = torch.ones(64, 64, device=accelerator.device) @ torch.ones(64, 64, device=accelerator.device)
    assert accelerator.device.type == "cuda" and accelerator.mixed_precision == "bf16"
    assert accelerator.gather(x[0, :1].cpu()).tolist() == [64.0, 64.0]
    accelerator.print("TRAINED", name)
"""


def _python(source: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "notebook.py")
        script.write_text(source)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90)
    return done.stdout + done.stderr


@check
def a_notebook_forks_and_spawns_on_the_gpu() -> None:
    ways = """
if __name__ == "__main__":
    import warnings
    warnings.simplefilter("ignore")
    notebook_launcher(train, ("forked",), num_processes=2, mixed_precision="bf16")
    torch.ones(1).cuda()
    notebook_launcher(train, ("spawned",), num_processes=2, mixed_precision="bf16", start_method="spawn")
"""
    output = _python(TRAIN + ways)
    assert "TRAINED forked" in output and "TRAINED spawned" in output, output


@check
def the_line_that_started_cuda_is_named() -> None:
    late = """
import warnings
warnings.simplefilter("ignore")
model = torch.nn.Linear(2, 2)
model.cuda()  # too early
notebook_launcher(train, ("never",), num_processes=2)
"""
    output = _python(TRAIN + late)
    assert "CUDA was started in this notebook by" in output and "`model.cuda()  # too early`" in output, output


@check
def looking_at_the_machine_starts_no_cuda() -> None:
    source = """
import torch
from accelerate import notebook_launcher
from accelerate.launchers import _gpus
assert _gpus() == torch.cuda.device_count() > 0
assert not torch.cuda.is_initialized()
import os
pid = os.fork()
if pid == 0:
    torch.ones(1).cuda()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("FINE")
"""
    assert "FINE" in _python(source)


@check
def env_and_test_know_the_gpu() -> None:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    environ = {**os.environ, "HF_HOME": "/nonexistent"}
    done = subprocess.run([*command, "env"], capture_output=True, text=True, timeout=30, env=environ)
    name = torch.cuda.get_device_name(0)
    assert done.returncode == 0 and name.split()[-1] in done.stdout and "x cuda" in done.stdout, (
        done.stdout + done.stderr
    )
    done = subprocess.run([*command, "test"], capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0 and "9 of 9 checks passed" in done.stdout, done.stdout + done.stderr


@check
def the_estimate_of_memory_is_near_the_truth() -> None:
    import transformers

    from accelerate import Accelerator
    from accelerate.estimate import batches
    from accelerate.estimate.usage import Workload, measure, usage

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
    )
    config.architectures = ["LlamaForCausalLM"]
    step = batches.of_transformers(config, 8, 512, False)
    with torch.device("meta"):
        empty = step.build()
    count = sum(parameter.numel() for parameter in empty.parameters())
    activations, copies = measure(empty, step.run, "bf16")
    task = Workload(count, count, 0, activations, copies, compute_bytes=2)
    expected = usage(task, 1)["one process"].device

    reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accelerator = Accelerator(mixed_precision="bf16")
    model: Any = transformers.LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.zeros(8, 512, dtype=torch.long, device="cuda")
    for _ in range(3):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay, as they do behind accumulation
    real = torch.cuda.max_memory_allocated() - before
    print(f"estimated {expected / 2**30:.2f} GiB, used {real / 2**30:.2f} GiB")
    assert 0.75 < expected / real < 1.3, (expected, real)
