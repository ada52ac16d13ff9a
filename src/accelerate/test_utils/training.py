"""A tiny regression task for tests."""

from __future__ import annotations

import numpy as np
import torch


class RegressionDataset:
    """Points near the line `y = a * x + b`."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.length = length
        self.x = random.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + random.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, np.float32]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(torch.nn.Module):
    """A line with two parameters; it prints the dtypes of its first batch."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the points of the line."""
        if x is None:
            raise TypeError("RegressionModel needs its input `x`.")
        if self.first_batch:
            print(f"Parameters are {self.a.dtype} and {self.b.dtype}, the input is {x.dtype}.")
            self.first_batch = False
        return x * self.a + self.b
