"""Continuing in the middle of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accelerate.data_loader.base import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    kept_arguments,
    same_batches,
    skipped_batches,
)


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A plain loader without its first `skip_batches` batches, which are fetched and thrown away."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self._join_process()

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for batch in itertools.islice(iter(self.base_dataloader), self.skip_batches, None):
                self._note_state()
                yield self._hand_out(batch)
        finally:
            self.end()


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader for this epoch only, which starts after the first `num_batches` batches of `dataloader`.

    What is skipped is not even fetched, wherever a batch sampler decides what is.
    """
    if hasattr(dataloader, "without_first"):  # a prepared one
        return dataloader.without_first(num_batches)
    arguments = kept_arguments(dataloader)
    batches = skipped_batches(dataloader, num_batches)
    if batches is not None:
        return DataLoader(dataloader.dataset, **arguments, **batches)
    return SkipDataLoader(dataloader.dataset, num_batches, **arguments, **same_batches(dataloader))
