"""Small models with the traits that offloading has to cope with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.register_buffer("shift", torch.randn(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) + self.shift


class Model(nn.Module):
    """A parameter of its own, a tie, and weights that are used by the parent of their module."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = x * self.scale
        direct = F.linear(x, self.unused.weight, self.unused.bias) + x @ self.embed.weight.T
        return self.head(x) + direct + x[:, :1] * self.layers[0].linear.weight.to(x.dtype).sum()


def model() -> Model:
    torch.manual_seed(0)
    made = Model().eval()
    for layer in made.layers:
        layer.norm.running_mean.normal_()
    return made


TOKENS = torch.tensor([1, 5, 2, 9])
