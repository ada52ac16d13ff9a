"""Loaders of Megatron-LM: those of the script with larger batches, and those of its own indexed datasets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.data_loader.torch_loaders import kept_arguments


def enlarged(loader: Any, times: int) -> Any:
    """A loader whose batches hold those of so many micro-batches. `loader` stays as it is."""
    if times == 1:
        return loader
    arguments = kept_arguments(loader)
    if isinstance(loader.dataset, IterableDataset):
        size = (loader.batch_size or 1) * times
        return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, **arguments)
    sampler = loader.batch_sampler
    if type(sampler) is BatchSampler:
        larger: Any = BatchSampler(sampler.sampler, sampler.batch_size * times, sampler.drop_last)
    elif hasattr(sampler, "batch_size"):
        larger = copy.copy(sampler)
        larger.batch_size = sampler.batch_size * times
    else:
        raise ValueError(
            f"num_micro_batches={times} makes batches larger, but {type(sampler).__name__} has no `batch_size` to "
            "multiply: give the loader a `batch_size`, or a batch sampler that has one."
        )
    return DataLoader(loader.dataset, batch_sampler=larger, **arguments)


class DatasetLoader:
    """What a script gets for a `MegatronLMDummyDataLoader`: to be iterated, or asked for one batch after the other.

    prepare: makes of a DataLoader the one of this process.
    """

    def __init__(self, dummy: Any, prepare: Callable[[Any], Any]) -> None:
        self.dummy = dummy
        self.prepare = prepare
        self.loader: Any = None
        self._running: Iterator[Any] | None = None

    @property
    def micro_batch_size(self) -> int | None:
        size: int | None = self.dummy.dataset_args.get("micro_batch_size")
        return size

    def build(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """The loaders for training, validation and test."""
        self.dummy.accelerator = accelerator
        self.dummy.set_megatron_data_args()
        made: tuple[Any, Any, Any] = self.dummy.build_train_valid_test_data_iterators(accelerator)
        return made

    def fill(self, loader: Any) -> None:
        """Take one of the loaders; None where there is no data for it."""
        self.loader = None if loader is None else self.prepare(loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader if self.loader is not None else ())

    def __len__(self) -> int:
        return 0 if self.loader is None else len(self.loader)

    def __next__(self) -> Any:
        """The next batch; after the last one, the first of another epoch."""
        if self._running is None:
            self._running = iter(self)
        try:
            return next(self._running)
        except StopIteration:
            self._running = iter(self)
            return next(self._running)
