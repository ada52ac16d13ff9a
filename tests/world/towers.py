"""A small language model and what one process makes of it, for the tests of sharded training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate import Accelerator


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """Tied ends, equal blocks between them, and a buffer that is not saved."""

    def __init__(self, width: int = 8, depth: int = 2, words: int = 16, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.register_buffer("shift", torch.randn(width, generator=generator), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens_of(step: int, rank: int, ranks: int, samples: int = 8, length: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    batch = torch.randint(0, 16, (samples, length), generator=generator)
    return batch[rank * samples // ranks : (rank + 1) * samples // ranks]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def micro_batches(
    accelerator: Accelerator, model: Any, optimizer: Any, steps: range, rank: int, ranks: int
) -> list[float]:
    """Losses of batches under accumulation, each the mean over all processes. rank, ranks: whose share of the data."""
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens_of(step, rank, ranks))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def train_alone(steps: int, max_norm: float = 1.0) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """What one process gets from the whole batches."""
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, tokens_of(step, 0, 1))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, model.state_dict()


def trains_as_one_process(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int, share: int, shares: int
) -> None:
    """Train a prepared tower on a share of the data: losses, norms and weights must be those of one process."""
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, tokens_of(step, share, shares))
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    expected, expected_norms, weights = train_alone(steps)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-5)
    state = accelerator.get_state_dict(model)
    assert set(state) == (set(weights) if accelerator.is_main_process else set())
    for name, value in state.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-4)
