"""Small data for the tests of loaders."""

from __future__ import annotations

from torch.utils.data import Dataset


class Numbers(Dataset):
    """Each sample is its index. fetched: how many were asked for."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.fetched = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.fetched += 1
        return index
