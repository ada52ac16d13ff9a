"""Tiny tasks for tests: a line through points, and pairs of sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from accelerate.test_utils import sentence_pairs


class RegressionDataset(Dataset[dict[str, np.float32]]):
    """Generate points near the line `y = a * x + b`.

    Args:
        a: the slope.
        b: the intercept.
        length: the number of points.
        seed: the seed of their noise and positions.
    """

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
    """Compute a line with two parameters, and print the dtypes of the first batch.

    Args:
        a: the slope to start from.
        b: the intercept to start from.
        double_output: not used; accepted as in the 1.15 release.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a: torch.nn.Parameter = torch.nn.Parameter(torch.tensor(a).float())
        self.b: torch.nn.Parameter = torch.nn.Parameter(torch.tensor(b).float())
        self.first_batch: bool = True

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the points of the line.

        Args:
            x: their positions.
        """
        if x is None:
            raise TypeError("RegressionModel needs its input `x`.")
        if self.first_batch:
            print(f"Parameters are {self.a.dtype} and {self.b.dtype}, the input is {x.dtype}.")
            self.first_batch = False
        return x * self.a + self.b


# Where example scripts keep samples for their tests; small ones are made where they are not.
_SAMPLES = Path("tests", "test_samples", "MRPC")


def _samples(name: str, number: int) -> list[sentence_pairs.Pair]:
    path = _SAMPLES / name
    return sentence_pairs.read_pairs(path) if path.exists() else sentence_pairs.make_pairs(number, seed=number)


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Create small loaders of sentence pairs for training and evaluation, in place of those of an example.

    Args:
        accelerator: the Accelerator.
        batch_size: not used: batches have 2 samples, and 1 in evaluation, so that there are several.
    """
    return sentence_pairs.loaders(accelerator, _samples("train.csv", 16), _samples("dev.csv", 8), 2, eval_size=1)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Any, batch_size: int = 16
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Create such loaders for models that predict the next word: labels are the words, one further on.

    Args:
        accelerator: the Accelerator.
        batch_size: not used: batches have 2 samples, and 1 in evaluation, so that there are several.
    """
    samples = (_samples("train.csv", 16), _samples("dev.csv", 8))
    return sentence_pairs.next_word_loaders(accelerator, *samples, 2, eval_size=1)
