"""A batch read on rank 0 and handed to every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from harness import Figure
from step import endless, plain_world
from worker import Block

BATCH = 8


def figures() -> list[Figure]:
    return [
        Figure("dispatched batch of 4 KB, 2 processes", "dispatch", "peer", 0.5, {"floats": 64}, 2, 40),
        Figure("dispatched batch of 1 MB, 2 processes", "dispatch", "peer", 0.5, {"floats": 32000}, 2, 20),
    ]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Ready samples without end, so that hardly anything but the dispatching is measured."""

    def __init__(self, floats: int) -> None:
        self.sample = {"values": torch.randn(floats), "tokens": torch.arange(32), "label": torch.tensor(1)}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield self.sample


def plain(floats: int) -> Block:
    """Hand-written: rank 0 reads a batch per rank and scatters tensors whose shapes everybody knows."""
    world = plain_world()
    source = iter(DataLoader(Stream(floats), batch_size=BATCH)) if dist.get_rank() == 0 else None
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "values": ((BATCH, floats), torch.float32),
        "tokens": ((BATCH, 32), torch.int64),
        "label": ((BATCH,), torch.int64),
    }

    def block(steps: int) -> None:
        for _ in range(steps):
            read = [next(source) for _ in range(world)] if source is not None else []
            for key, (shape, dtype) in shapes.items():
                dist.scatter(torch.empty(shape, dtype=dtype), [batch[key] for batch in read] or None)

    return block


def prepared(floats: int) -> Block:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    batches = endless(accelerator.prepare(DataLoader(Stream(floats), batch_size=BATCH)))

    def block(steps: int) -> None:
        for _ in range(steps):
            next(batches)

    return block
