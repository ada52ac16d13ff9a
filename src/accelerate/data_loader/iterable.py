"""One process's share of an iterable dataset that every process reads from start to end."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate.data_loader.samplers import check_split
from accelerate.torch_internals import data_loader


class IterableDatasetShard(IterableDataset):
    """One process's shard of an iterable dataset: of each group of one batch per process, it keeps its own.

    Args:
        dataset: the dataset, which every process reads from start to end.
        batch_size: the batch size of one process, or of all together with `split_batches`.
        drop_last: whether an incomplete group at the end is left out; otherwise samples from the start fill it up.
        num_processes: how many shards there are.
        process_index: which of them this is.
        split_batches: whether the batch size is that of all processes together.

    Raises:
        ValueError: if the processes do not divide the batch size with `split_batches`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1:
            check_split(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch: int = 0
        self.mark_repeats = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _own_size(self) -> int:
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __len__(self) -> int:
        groups = len(self.dataset) / (self._own_size * self.num_processes)
        return (math.floor(groups) if self.drop_last else math.ceil(groups)) * self._own_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        size, group_size = self._own_size, self._own_size * self.num_processes
        mine = slice(size * self.process_index, size * (self.process_index + 1))
        samples = iter(self.dataset)
        start: list[Any] = []
        while group := list(itertools.islice(samples, group_size)):
            start = start or group
            if len(group) == group_size:
                yield from group[mine]
            elif not self.drop_last:
                repeats: Iterator[Any] = itertools.cycle(start)
                if self.mark_repeats:
                    repeats = map(Repeat, repeats)
                yield from itertools.islice(itertools.chain(group, repeats), mine.start, mine.stop)


def knows_shards(dataset: Any, processes: int) -> bool:
    """Whether a dataset is of Hugging Face's `datasets`, and its files or parts can be shared out evenly.

    Then a process need not read what belongs to the others.
    """
    datasets: Any = sys.modules.get("datasets")  # or there can be none of its
    kind: Any = getattr(datasets, "IterableDataset", ())
    return isinstance(dataset, kind) and dataset.num_shards % processes == 0


class SkippedDataset(IterableDataset):
    """An iterable dataset without its first `skip_samples` samples, which are read and thrown away."""

    def __init__(self, dataset: Any, skip_samples: int) -> None:
        self.dataset = dataset
        self.skip_samples = skip_samples

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)  # set_epoch, generator, ...

    def __len__(self) -> int:
        return max(len(self.dataset) - self.skip_samples, 0)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dataset, self.skip_samples, None)


def without_first_samples(dataset: Any, count: int) -> Any:
    """An iterable dataset, or a share of one, for what follows the first `count` samples of all processes."""
    if not isinstance(dataset, IterableDatasetShard):
        return SkippedDataset(dataset, count)
    twin = copy.copy(dataset)
    twin.dataset = SkippedDataset(dataset.dataset, count)
    return twin


class Repeat:
    """A sample that only fills a batch; the collate function counts it and takes it out of its envelope."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample


class Envelope:
    """A batch on its way from a worker to the loader."""

    def __init__(self, batch: Any) -> None:
        self.batch: Any = batch

    def pin_memory(self) -> Envelope:
        self.batch = data_loader.pin_memory(self.batch)
        return self


class PartlyRepeated(Envelope):
    """counts: how many samples of the batch are no repeats, and how many it has."""

    def __init__(self, batch: Any, counts: tuple[int, int]) -> None:
        super().__init__(batch)
        self.counts = counts


class CountingCollate:
    """A collate function that knows how many samples of a batch are repeats."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        # Repeats come last, so one look at the end of a batch is enough.
        if not (isinstance(samples, list) and samples and isinstance(samples[-1], Repeat)):
            if isinstance(samples, Repeat):  # batch_size=None: the sample is the batch
                return PartlyRepeated(self.collate(samples.sample), (0, 1))
            return self.collate(samples)
        real = sum(not isinstance(sample, Repeat) for sample in samples)
        plain = [sample.sample if isinstance(sample, Repeat) else sample for sample in samples]
        return PartlyRepeated(self.collate(plain), (real, len(plain)))
