"""One evaluation step: forward, then predictions and targets of all ranks on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from harness import Figure
from step import endless, network, plain_device, plain_loader, plain_world, samples
from worker import Block


def figures() -> list[Figure]:
    name = "evaluation step with gather_for_metrics, 2 processes"
    return [Figure(name, "gather", "baseline", 1.05, processes=2, steps=40)]


def all_ranks(tensor: torch.Tensor, world: int) -> torch.Tensor:
    if world == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def plain(width: int = 256, batch: int = 32, count: int = 20000) -> Block:
    world, device = plain_world(), plain_device()
    model: nn.Module = network(width).to(device)
    if world > 1:
        model = DistributedDataParallel(model)
    model.eval()
    batches = endless(plain_loader(samples(width, count), batch, world))

    @torch.no_grad()
    def block(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            predictions = model(x).argmax(dim=-1)
            all_ranks(predictions, world), all_ranks(y, world)

    return block


def prepared(width: int = 256, batch: int = 32, count: int = 20000) -> Block:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, loader = accelerator.prepare(network(width), DataLoader(samples(width, count), batch_size=batch))
    model.eval()
    batches = endless(loader)

    @torch.no_grad()
    def block(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            predictions = model(x).argmax(dim=-1)
            accelerator.gather_for_metrics((predictions, y))

    return block
