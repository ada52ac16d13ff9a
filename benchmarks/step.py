"""One training step: what the package adds to hand-written PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness import Figure, processes_text
from worker import Block

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def figures() -> list[Figure]:
    found = []
    for processes in (1, 2):
        for precision in ("fp32", "bf16"):
            for accumulation in (1, 4):
                name = f"step, {processes_text(processes)}, {precision}, accumulation {accumulation}"
                args = {"precision": precision, "accumulation": accumulation}
                found.append(Figure(name, "step", "added", 0.25, args, processes, steps=40, beside=True))
    large = {"width": 640, "batch": 32}
    name = "training step of 10 to 20 ms, 2 processes"
    found.append(Figure(name, "step", "baseline", 1.02, large, 2, 8, 4, 60, 25.0))
    return found


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def samples(width: int, count: int) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(count, width), torch.randint(0, 10, (count,)))


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch: the figures are of the steady state."""
    while True:
        yield from loader


def plain_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def plain_world() -> int:
    """Join the world torchrun's variables describe; 1 when there is none."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    return world


def plain_loader(data: TensorDataset, batch: int, world: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] | None = DistributedSampler(data, shuffle=False) if world > 1 else None
    return DataLoader(data, batch_size=batch, sampler=sampler)


def plain(precision: str = "fp32", accumulation: int = 1, width: int = 64, batch: int = 8, count: int = 20000) -> Block:
    world, device = plain_world(), plain_device()
    model: nn.Module = network(width).to(device)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = endless(plain_loader(samples(width, count), batch, world))
    dtype = DTYPES.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    done = 0

    def block(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            x, y = next(batches)
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            done += 1
            last = done % accumulation == 0
            with nullcontext() if last or world == 1 else model.no_sync():  # type: ignore[operator]
                if dtype is None:
                    logits = model(x)
                else:
                    with torch.autocast(device.type, dtype):
                        logits = model(x)
                loss = F.cross_entropy(logits.float(), y)
                if accumulation > 1:
                    loss = loss / accumulation
                scaler.scale(loss).backward()
            if last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    return block


def prepared(
    precision: str = "fp32", accumulation: int = 1, width: int = 64, batch: int = 8, count: int = 20000
) -> Block:
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision, gradient_accumulation_steps=accumulation
    )
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(samples(width, count), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = endless(loader)

    def every_step(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def accumulated(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return every_step if accumulation == 1 else accumulated
