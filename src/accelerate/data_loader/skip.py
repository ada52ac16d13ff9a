"""Continuing in the middle of an epoch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.torch_loaders import kept_arguments, same_batches, skipped_batches
from accelerate.errors import a_kind_of


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader without its first batches, which are fetched and thrown away.

    Args:
        dataset: the dataset.
        skip_batches: how many batches to leave out.
        use_stateful_dataloader: whether to use torchdata's `StatefulDataLoader`.
        **kwargs: as for torch's `DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, skip_batches=skip_batches, **kwargs)
        self._join_process()

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for batch in itertools.islice(iter(self.part.torch_loader), self.skip_batches, None):
                self._note_state(self.part)
                yield self._hand_out(batch)
        finally:
            self.end()


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Make a loader for the rest of this epoch, without its first batches.

    Skipped batches are not fetched, unless the dataset is iterable. After `load_state` nothing is skipped twice.

    Args:
        dataloader: a torch loader, prepared or not.
        num_batches: how many batches to leave out.

    Returns:
        A loader for the rest. When it has been read, a prepared `dataloader` goes on with the next epoch.
    """
    num_batches = _whole(num_batches)
    if num_batches < 0:
        raise ValueError(f"num_batches is {num_batches}: it must be at least 0.")
    if hasattr(dataloader, "without_first"):  # a prepared one, or one around it
        return dataloader.without_first(num_batches)
    if not hasattr(dataloader, "dataset"):
        raise AttributeError(  # as the release does, with other words
            f"skip_first_batches takes a DataLoader, but was given {a_kind_of(dataloader)}: pass the loader "
            "itself, or skip batches with `itertools.islice`."
        )
    arguments = kept_arguments(dataloader)
    batches = skipped_batches(dataloader, num_batches)
    if batches is not None:
        return DataLoader(dataloader.dataset, **arguments, **batches)
    if isinstance(dataloader, SkipDataLoader):
        num_batches += dataloader.skip_batches
    return SkipDataLoader(dataloader.dataset, num_batches, **arguments, **same_batches(dataloader))


def _whole(num_batches: Any) -> int:
    try:
        is_whole = isinstance(num_batches, float) and num_batches.is_integer()  # as from a division
        return operator.index(int(num_batches) if is_whole else num_batches)
    except TypeError:
        raise TypeError(f"num_batches is {num_batches!r}: pass a whole number.") from None
