"""Small models, data and hand-written loops that the training tests share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.comm import current
from accelerate.parallel.shards import whole

# What a plain `python script.py` does not have: for `run_world(..., env=ALONE)`.
ALONE: dict[str, str | None] = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))


class Net(nn.Module):
    """Two layers, built from a seed so that every rank has the same weights."""

    def __init__(self, seed: int = 0, inputs: int = 4, hidden: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(inputs, hidden)
        self.last = nn.Linear(hidden, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def data(samples: int = 32, inputs: int = 4, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=generator)
    return TensorDataset(x, torch.sin(x.sum(dim=1, keepdim=True)))


def loader(samples: int = 32, batch_size: int = 4, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size=batch_size, **kwargs)


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector, wherever their pieces are."""
    fsdp = sys.modules["torch.distributed.fsdp"] if _in_flat_pieces() else None
    with fsdp.FullyShardedDataParallel.summon_full_params(model) if fsdp else nullcontext():
        return torch.cat([whole(p).float().flatten().clone() for p in model.parameters()])


def _in_flat_pieces() -> bool:
    """Whether this is FSDP version 1, where tensors do not know how they are cut."""
    return "ACCELERATE_USE_FSDP" in os.environ and os.environ.get("FSDP_VERSION", "1") == "1"


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.grad is not None])


def everywhere(value: torch.Tensor) -> list[torch.Tensor]:
    """The value of each rank."""
    return current().gather_objects(value)


def assert_same_everywhere(value: torch.Tensor) -> None:
    for rank, other in enumerate(everywhere(value)):
        assert torch.equal(other, value), f"rank {rank} differs by {(other - value).abs().max()}"


def optimizer_values(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """All numbers in an optimizer's state as one vector."""
    found: list[torch.Tensor] = []
    for values in optimizer.state_dict()["state"].values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                cut = _in_flat_pieces() and value.ndim == 1
                found.append((torch.cat(everywhere(value)) if cut else whole(value)).flatten().float().cpu())
    return torch.cat(found) if found else torch.zeros(1)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def steps_of_epoch(batches: int, accumulation: int) -> int:
    return math.ceil(batches / accumulation)


def drain(iterable: Iterable[Any]) -> None:
    for _ in iterable:
        pass
