"""Iterating a loader: what the package adds to each batch."""

from __future__ import annotations

from torch.utils.data import DataLoader

from harness import Figure, processes_text
from step import endless, plain_device, plain_loader, plain_world, samples
from worker import Block


def figures() -> list[Figure]:
    names = {processes: f"loader, per batch, {processes_text(processes)}" for processes in (1, 2)}
    return [Figure(name, "loader", "added", None, {}, processes, 200) for processes, name in names.items()]


def plain(width: int = 64, batch: int = 8, count: int = 20000) -> Block:
    device = plain_device()
    batches = endless(plain_loader(samples(width, count), batch, plain_world()))

    def block(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    return block


def prepared(width: int = 64, batch: int = 8, count: int = 20000) -> Block:
    from accelerate import Accelerator

    batches = endless(Accelerator().prepare(DataLoader(samples(width, count), batch_size=batch)))

    def block(steps: int) -> None:
        for _ in range(steps):
            next(batches)

    return block
