"""The same random numbers in every run of a test."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_test() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def seed_rank(rank: int) -> None:
    """As processes that were started one by one: different states, but for torch, whose first seed is a constant."""
    random.seed(rank + 1)
    np.random.seed(rank + 1)
