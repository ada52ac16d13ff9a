"""A training step of a sharded model beside hand-written `fully_shard`, on CPU processes; run with torchrun.

    python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/sharding.py

Both take turns, step by step, in one process, so that a busy machine disturbs both alike. Prints medians of the time,
and of the CPU time of all threads, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accelerate import Accelerator, FullyShardedDataParallelPlugin


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


class Plain:
    def __init__(self, width: int, depth: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model: Any = network(width, depth)
        for block in self.model[:-1]:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


class Ours:
    def __init__(self, width: int, depth: int, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        model = network(width, depth)
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.accelerator.backward(loss)
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    subjects = {"plain": Plain(options.width, options.depth), "ours": Ours(options.width, options.depth, accelerator)}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    cpu: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(options.rounds + 5):
        torch.manual_seed(number)
        x, y = torch.randn(32, options.width), torch.randint(0, 16, (32,))
        order = list(subjects.items())
        for name, subject in order if number % 2 else reversed(order):
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            subject.step(x, y)
            if number >= 5:  # the first ones set things up
                times[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
    result: dict[str, float] = {"processes": float(dist.get_world_size())}
    for name in subjects:
        result[f"{name}_ms"] = round(statistics.median(times[name]) * 1e3, 3)
        result[f"{name}_cpu_ms"] = round(statistics.median(cpu[name]) * 1e3, 3)
    result["ratio"] = round(result["ours_ms"] / result["plain_ms"], 4)
    result["cpu_ratio"] = round(result["ours_cpu_ms"] / result["plain_cpu_ms"], 4)
    if accelerator.is_main_process:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
