"""Samplers: which indices a process reads, and in which order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# Those of torch's that draw an order from a generator.
RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends on a seed and the epoch alone.

    Args:
        *args: as for torch's `RandomSampler`.
        **kwargs: as for torch's `RandomSampler`, and `data_seed`: the seed; by default torch's initial seed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        epoch = self.epoch
        self.generator.manual_seed(self.initial_seed + epoch)
        try:
            yield from super().__iter__()
        finally:
            # Also when it is broken off, or else it would repeat itself; unless somebody has chosen an epoch meanwhile.
            if self.epoch == epoch:
                self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Otherwise it is one more after each iteration, finished or not.

        Args:
            epoch: its number.
        """
        self.epoch = epoch


def check_split(batch_size: int | None, processes: int) -> None:
    """Refuse a batch size that cannot be split among the processes."""
    if batch_size is None or batch_size % processes:
        raise ValueError(
            f"split_batches=True needs a batch size that is a multiple of the {processes} processes, but it is "
            f"{batch_size}."
        )


class CountedShard(BatchSampler):
    """One process's batches, of which it is known how many samples are repeats."""

    missed_steps: int = 0
    uneven: bool = False
    # By the number of a batch, where some of its samples are repeats. The number of the last one.
    _counts: dict[int, tuple[int, int]]
    _last: int

    def counts(self, number: int) -> tuple[int, int] | None:
        """Count the samples of one of this process's batches.

        Args:
            number: the number of the batch in this iteration. -1 is the last batch of a finished iteration.

        Returns:
            How many of its samples are not repeats, and how many it has. None if none is a repeat, or if the iteration
            has not come to that batch yet.
        """
        return self._counts.get(self._last if number == -1 else number)

    def _begin(self) -> None:
        self._counts = {}
        self._last = -1


class BatchSamplerShard(CountedShard):
    """One process's shard of the batches of a batch sampler.

    Args:
        batch_sampler: the batch sampler of all processes together.
        num_processes: how many shards there are.
        process_index: which of them this is.
        split_batches: whether each batch is split among the processes, instead of whole batches being assigned in turn.
        even_batches: whether samples from the start fill up the end, so that all processes get equally many batches of
            the same size (whole batches, where the batch sampler has no `batch_size`). Otherwise the last processes may
            get a smaller batch, or one batch less.

    Attributes:
        missed_steps: after an iteration, how many more batches other processes got.
        uneven: after an iteration, whether any process got fewer batches than others.

    Raises:
        ValueError: if the processes do not divide the batch size with `split_batches`.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            check_split(self.batch_size, num_processes)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self._begin()

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of indices underneath."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """The number of batches before sharding."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        length = len(self.batch_sampler)
        if self.split_batches:
            return length - self._misses_last_piece()
        share, extras = divmod(length, self.num_processes)
        if self.drop_last or extras == 0:
            return share
        return share + (self.even_batches or self.process_index < extras)

    def _misses_last_piece(self) -> bool:
        """Whether the last batch is known to be too small for a piece for this process."""
        if self.even_batches or self.drop_last or not hasattr(self.sampler, "__len__"):
            return False
        assert self.batch_size is not None
        last = len(self.sampler) % self.batch_size
        return 0 < last <= self.batch_size // self.num_processes * self.process_index

    @property
    def batches_per_step(self) -> int:
        """How many batches of the batch sampler all processes together take for one of theirs."""
        return 1 if self.split_batches else self.num_processes

    def __iter__(self) -> Iterator[list[Any]]:
        sampler = self.sampler
        if not self.split_batches and type(self.batch_sampler) is BatchSampler and type(sampler) in COUNTED_SAMPLERS:
            self._begin()
            return self._iter_cut(sampler)
        # At once, not with the first batch: its order may be drawn here, before torch's loader draws a number.
        return self.iterate(iter(self.batch_sampler))

    def iterate(
        self, batches: Iterator[list[Any]], done: int = 0, first: Sequence[list[Any]] = ()
    ) -> Iterator[list[Any]]:
        """Shard batches that come from elsewhere.

        Args:
            batches: batches of indices, over all processes.
            done: how many steps were taken before the first of them.
            first: the batches of the first step, which are repeated where the last step is short.

        Returns:
            This process's share of them.
        """
        self._begin()
        if self.split_batches:
            return self._iter_pieces(batches, done, list(first[0]) if first else [])
        return self._iter_whole(map(list, batches), done, list(first))

    def _begin(self) -> None:
        super()._begin()
        self.missed_steps = 0
        self.uneven = False

    def _iter_whole(self, batches: Iterator[list[Any]], done: int, first: list[list[Any]]) -> Iterator[list[Any]]:
        """Batches in groups of one per process; the group at the end may be incomplete."""
        processes, mine, size = self.num_processes, self.process_index, self.batch_size
        held: list[list[Any]] | None = None
        number = done - 1
        while group := list(itertools.islice(batches, processes)):
            number += 1
            if held is not None:
                # Not the end after all: a batch sampler of its own may have small batches anywhere.
                yield held[mine]
                held = None
            first = first or group
            if len(group) == processes and (size is None or len(group[-1]) == size):
                yield group[mine]
            else:
                held = group
        if held is None or self.drop_last:
            return
        group = held
        if self.even_batches:
            self._last = number
            if size is None:
                yield self._repeated(number, group, first)
            else:
                samples, start = (list(itertools.chain.from_iterable(batches)) for batches in (group, first))
                yield self._fill(number, samples, start, size)
            return
        self.uneven = len(group) < self.num_processes
        if self.process_index < len(group):
            yield group[self.process_index]
        else:
            self.missed_steps = 1

    def _iter_cut(self, sampler: Any) -> Iterator[list[Any]]:
        """As `_iter_whole`, where it is known how many indices there are: those of other processes are left out.

        With thousands of processes, to read them all takes each of them milliseconds at every step.
        """
        size, mine = self.batch_size, self.process_index
        assert size is not None
        group = size * self.num_processes
        steps = len(sampler) // group
        indices = COUNTED_SAMPLERS[type(sampler)](sampler)
        first = list(itertools.islice(indices, group)) if steps else []
        for step in range(steps):
            if step:
                leave_out(indices, size * mine)
                batch = list(itertools.islice(indices, size))
                leave_out(indices, size * (self.num_processes - mine - 1))
                yield batch
            else:
                yield first[size * mine : size * (mine + 1)]
        rest = list(indices)
        batches = (rest[at : at + size] for at in range(0, len(rest), size))
        if self.drop_last:
            return  # after the end of the order, at which some samplers go on to the next epoch
        yield from self._iter_whole(batches, steps, [first] if first else [])

    def _iter_pieces(self, batches: Iterator[list[Any]], done: int, start: list[Any]) -> Iterator[list[Any]]:
        """A piece of every batch; the last one may be too small to cut."""
        assert self.batch_size is not None
        size = self.batch_size // self.num_processes
        mine = slice(size * self.process_index, size * (self.process_index + 1))
        partial: list[Any] | None = None
        for number, batch in enumerate(batches, done):
            if partial is not None:
                yield self._fill(self._last, partial, start, size)
                partial = None
            self._last = number
            start = start or list(batch)
            if len(batch) == self.batch_size:
                yield list(batch[mine])
            else:
                partial = list(batch)
        if not partial or self.drop_last:
            return
        if self.even_batches:
            yield self._fill(self._last, partial, start, size)
            return
        self.uneven = len(partial) <= size * (self.num_processes - 1)
        if partial[mine]:
            yield partial[mine]
        else:
            self.missed_steps = 1

    def _repeated(self, number: int, group: list[list[Any]], first: list[list[Any]]) -> list[Any]:
        """This process's batch of `group`, or else one of the `first` batches once more."""
        missing = self.process_index - len(group)
        if missing < 0:
            return group[self.process_index]
        batch = first[missing % len(first)]
        self._counts[number] = (0, len(batch))
        return batch

    def _fill(self, number: int, indices: list[Any], start: list[Any], size: int) -> list[Any]:
        """This process's `size` of `indices`, followed by samples from the start as often as needed."""
        # A batch sampler of its own may have batches larger than its nominal size, too.
        size = max(size, -(-len(indices) // self.num_processes))
        first = size * self.process_index
        real = min(max(len(indices) - first, 0), size)
        if real < size:
            self._counts[number] = (real, size)
        filled = itertools.chain(indices, itertools.cycle(start))
        return list(itertools.islice(filled, first, first + size))


class Leaping(Iterator[int]):
    """An iteration that comes to any of its items at once."""

    def leave_out(self, count: int) -> None:
        """Without the next `count` items."""
        raise NotImplementedError


class _Numbers(Leaping):
    """The numbers below a length."""

    def __init__(self, sampler: SequentialSampler) -> None:
        self._place = 0
        self._length = len(sampler)

    def __next__(self) -> int:
        if self._place >= self._length:
            raise StopIteration
        self._place += 1
        return self._place - 1

    def leave_out(self, count: int) -> None:
        self._place += count


# Samplers that give as many indices as their length says, and how they are iterated.
COUNTED_SAMPLERS: dict[type, Callable[[Any], Iterator[int]]] = {
    SequentialSampler: _Numbers,
    RandomSampler: iter,
    SeedableRandomSampler: iter,
}


def leave_out(iterator: Iterator[Any], count: int) -> None:
    """Leave out the next `count` items: at once, where it can leap, or they are in a list that generators hand on."""
    if isinstance(iterator, Leaping):
        iterator.leave_out(count)
        return
    while count > 0:
        inner: Any = iterator
        while isinstance(inner, GeneratorType) and inner.gi_yieldfrom is not None:
            inner = inner.gi_yieldfrom
        left = operator.length_hint(inner) if isinstance(inner, _ListIterator) else 0
        if left:
            leap = min(count, left)
            inner.__setstate__(inner.__reduce__()[2] + leap)
            count -= leap
        elif next(iterator, _END) is _END:
            return
        else:
            count -= 1


_ListIterator: Any = type(iter([]))
_END = object()


class KeptShard(CountedShard):
    """The batches of a loader whose DistributedSampler shards it already."""

    split_batches = False

    def __init__(self, batch_sampler: Any, distributed: DistributedSampler[Any]) -> None:
        self.batch_sampler = batch_sampler
        self.sampler = distributed
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.num_processes: int = distributed.num_replicas
        self._begin()

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._counted(iter(self.batch_sampler))

    def _counted(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        self._begin()
        distributed: Any = self.sampler
        # It deals samples out one by one, and appends the first ones again to give all ranks equally many.
        own = len(range(distributed.rank, len(distributed.dataset), distributed.num_replicas))
        seen = 0
        for number, batch in enumerate(batches):
            seen += len(batch)
            self._last = number
            if seen > own:
                self._counts[number] = (max(len(batch) - (seen - own), 0), len(batch))
            yield batch


class SamplerShard(Sampler[Any]):
    """One process's share of a sampler whose every index is a batch of its own (`batch_size=None`)."""

    def __init__(self, sampler: Any, shard: BatchSampler) -> None:
        self.sampler = sampler
        self.shard = shard  # of batches of one

    def __getattr__(self, name: str) -> Any:
        # counts, missed_steps, uneven, num_processes ... are those of the shard
        if name == "shard":
            raise AttributeError(name)
        return getattr(self.shard, name)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self.shard)


def cuts_in_order(batches: Any) -> bool:
    """Whether a batch sampler is torch's own, or that of torchdata's loaders: it only cuts what its sampler gives."""
    kind = type(batches)
    of_torchdata = (kind.__module__, kind.__name__) == ("torchdata.stateful_dataloader.sampler", "BatchSampler")
    return kind is BatchSampler or of_torchdata


def get_sampler(dataloader: Any) -> Any:
    """Find the sampler of indices of a loader, underneath all batching and sharding.

    Args:
        dataloader: a torch loader, prepared or not.

    Returns:
        The sampler; None for an iterable dataset.
    """
    return getattr(sampler_owner(dataloader), "sampler", None)


def sampler_in_use(dataloader: Any) -> Any:
    """Like `get_sampler`; for an iterable dataset, or without batches, whatever the loader calls its sampler."""
    owner = sampler_owner(dataloader)
    return getattr(dataloader if owner is None else owner, "sampler", None)


def sampler_owner(dataloader: Any) -> Any:
    """The object whose `sampler` attribute is the sampler of indices: what to assign to in order to replace it."""
    if isinstance(dataloader.dataset, IterableDataset):
        return None  # torch makes samplers up for these
    sampler = getattr(dataloader, "sampler", None)
    batches = sampler if isinstance(sampler, BatchSampler) else getattr(dataloader, "batch_sampler", None)
    while isinstance(getattr(batches, "batch_sampler", None), BatchSampler):
        batches = batches.batch_sampler  # type: ignore[union-attr]
    return batches
