"""A training step of sharded and of copied models beside the same written by hand, and the memory of sharding.

On CPU processes, with what rank 0 needs for loading and saving:

    python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/sharding.py

On one device by itself, also with parameters in host memory; --out keeps the figures in a file:

    python benchmarks/sharding.py --device cuda --out sharding.json

All take turns, step by step, in one process, so that a busy machine disturbs them alike. Prints medians of the time,
and of the CPU time of all threads, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState

WARM_UP = 5  # the first steps set things up


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def network(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 16))


# --- by hand ----------------------------------------------------------------------------------------------------------


class Plain:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def sharded_by_hand(model: nn.Sequential, device: torch.device, offload: bool = False) -> Plain:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if not offload:
        model.to(device)
    policy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
    for block in model[:-1]:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    return Plain(model)


# --- with an Accelerator ----------------------------------------------------------------------------------------------


class Ours:
    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


def accelerator(cpu: bool, **plugin: Any) -> Accelerator:
    """A new one, for another engine than the one before. plugin: settings of FSDP version 2; none for DDP."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, **plugin) if plugin else None
    return Accelerator(cpu=cpu, fsdp_plugin=fsdp)


# --- measuring --------------------------------------------------------------------------------------------------------


def take_turns(
    subjects: dict[str, Any], batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]], rounds: int
) -> dict[str, dict[str, float]]:
    """The median milliseconds of a step of each, by the clock and of the processor."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    order = list(subjects.items())
    for number in range(rounds + WARM_UP):
        x, y = batch(number)
        for name, subject in order if number % 2 else reversed(order):
            if dist.get_world_size() > 1:
                dist.barrier()
            wait_for(x.device)
            began, used = time.perf_counter(), time.process_time()
            subject.step(x, y)
            wait_for(x.device)
            if number >= WARM_UP:
                times[name].append((time.perf_counter() - began, time.process_time() - used))
    return {
        name: {
            "ms": round(statistics.median(wall for wall, _ in taken) * 1e3, 3),
            "cpu_ms": round(statistics.median(used for _, used in taken) * 1e3, 3),
        }
        for name, taken in times.items()
    }


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_mib(subject: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    """The most memory of the GPU that a step takes beyond what there was before it."""
    wait_for(x.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    subject.step(x, y)
    wait_for(x.device)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def ratios(found: dict[str, dict[str, float]], pairs: dict[str, str]) -> dict[str, float]:
    """pairs: ours -> the one beside it."""
    return {
        f"{name}: {kind} / {other}": round(found[name][kind] / found[other][kind], 4)
        for name, other in pairs.items()
        for kind in ("ms", "cpu_ms")
    }


def status_mib(field: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def peak_mib(function: Callable[[], Any]) -> float:
    """How much memory a call takes at most, over what there was before."""
    before = status_mib("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest value so far is forgotten
    function()
    return status_mib("VmHWM") - before


def memory(width: int, depth: int) -> dict[str, float]:
    """MiB on rank 0: while a model that only it has is spread, and while a sharded checkpoint is saved."""
    ours = accelerator(cpu=True, cpu_ram_efficient_loading=True, **BLOCKS)
    Ours(network(16, 1), ours).step(torch.randn(2, 16), torch.zeros(2, dtype=torch.long))  # whatever is needed once
    ours.free_memory()
    with torch.device("cpu" if ours.is_main_process else "meta"):
        model = network(width, depth)
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    share = size / ours.num_processes
    subject: Any = None

    def load() -> None:
        nonlocal subject
        subject = Ours(model, ours)

    loading = size + peak_mib(load)
    subject.step(torch.randn(2, width), torch.zeros(2, dtype=torch.long))
    with tempfile.TemporaryDirectory() as folder:
        targets = [folder]
        dist.broadcast_object_list(targets)
        saving = 3 * share + peak_mib(lambda: ours.save_state(f"{targets[0]}/checkpoint"))
        ours.wait_for_everyone()
    return {
        "model": round(size, 1),
        "loading": round(loading, 1),
        "loading / (model + share)": round(loading / (size + share), 3),
        "saving": round(saving, 1),
        "saving / (parameters and optimizer)": round(saving / (3 * share), 3),
    }


# --- the two ways to run this -----------------------------------------------------------------------------------------


def on_processes(options: argparse.Namespace) -> dict[str, Any]:
    """Several CPU processes, started by torchrun."""
    size = (options.width, options.depth)
    copied = Ours(network(*size), accelerator(cpu=True))
    spread = Ours(network(*size), accelerator(cpu=True, **BLOCKS))
    subjects = {
        "DDP by hand": Plain(DistributedDataParallel(network(*size))),
        "DDP": copied,
        "fully_shard by hand": sharded_by_hand(network(*size), torch.device("cpu")),
        "FSDP2": spread,
        "FSDP2, default policy": Ours(network(*size), accelerator(cpu=True, auto_wrap_policy=None)),
    }

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(number)
        return torch.randn(32, options.width), torch.randint(0, 16, (32,))

    found = take_turns(subjects, batch, options.rounds)
    by_hand = "fully_shard by hand"
    pairs = {"DDP": "DDP by hand", "FSDP2": by_hand, "FSDP2, default policy": by_hand}
    return {
        "processes": dist.get_world_size(),
        "steps": found,
        "ratios": ratios(found, pairs),
        "memory of rank 0 in MiB": memory(512, 32),
    }


def on_one_device(options: argparse.Namespace) -> dict[str, Any]:
    """One process, as under `torchrun --nproc_per_node 1`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
    cpu = options.device == "cpu"
    if cpu:  # for which an Accelerator makes no group by itself
        dist.init_process_group("gloo")
    size = (options.width, options.depth)
    spread = Ours(network(*size), accelerator(cpu, **BLOCKS))
    device = spread.accelerator.device
    subjects = {
        "plain PyTorch": Plain(network(*size).to(device)),
        "fully_shard by hand": sharded_by_hand(network(*size), device),
        "FSDP2": spread,
        "FSDP2, default policy": Ours(network(*size), accelerator(cpu, auto_wrap_policy=None)),
        "fully_shard by hand, offloaded": sharded_by_hand(network(*size), device, offload=True),
        "FSDP2, offloaded": Ours(network(*size), accelerator(cpu, cpu_offload=True, **BLOCKS)),
    }

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(number)
        return torch.randn(64, options.width, device=device), torch.randint(0, 16, (64,), device=device)

    found = take_turns(subjects, batch, options.rounds)
    by_hand = "fully_shard by hand"
    pairs = {"FSDP2": by_hand, "FSDP2, default policy": by_hand, "FSDP2, offloaded": f"{by_hand}, offloaded"}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "steps": found,
        "ratios": ratios(found, pairs) | ratios(found, dict.fromkeys(pairs, "plain PyTorch")),
        "most memory of the device in a step, in MiB": {
            name: device_mib(subject, *batch(0)) for name, subject in subjects.items() if device.type == "cuda"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="one process by itself on this device")
    parser.add_argument("--width", type=int, help="of the model; 256 on processes, 1024 on a GPU")
    parser.add_argument("--depth", type=int, default=4, help="of the model")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a file for the figures")
    options = parser.parse_args()
    options.width = options.width or (1024 if options.device == "cuda" else 256)
    began = time.monotonic()
    result = on_processes(options) if options.device is None else on_one_device(options)
    if dist.get_rank() == 0:
        text = json.dumps(result, indent=1)
        print(text)
        print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)
        if options.out is not None:
            options.out.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
