"""What is left of the indices of an epoch when some of them were read already."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from accelerate.data_loader.indexed import IndexedRandomSampler
from accelerate.data_loader.samplers import BatchSamplerShard, KeptShard, SamplerShard, cuts_in_order


class SkipSampler(Sampler[Any]):
    """A sampler without its first `skip_samples` indices."""

    def __init__(self, sampler: Any, skip_samples: int) -> None:
        self.sampler = sampler
        self.skip_samples = skip_samples

    def __len__(self) -> int:
        return max(len(self.sampler) - self.skip_samples, 0)

    def __iter__(self) -> Iterator[Any]:
        return indices_after(self.sampler, self.skip_samples)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class RestOfDistributed(Sampler[Any]):
    """What a DistributedSampler has after the first `count` samples of its order, dealt out again."""

    def __init__(self, distributed: Any, count: int) -> None:
        self._distributed = distributed
        self._count = count
        self.num_replicas, self.rank = distributed.num_replicas, distributed.rank
        self.dataset = range(max(len(distributed.dataset) - count, 0))

    def __len__(self) -> int:
        share, extra = divmod(len(self.dataset), self.num_replicas)
        return share + (extra > 0 and not self._distributed.drop_last)

    def __iter__(self) -> Iterator[Any]:
        everyone = copy.copy(self._distributed)
        everyone.num_replicas, everyone.rank, everyone.drop_last = 1, 0, False
        everyone.num_samples = everyone.total_size = len(everyone.dataset)
        order = list(everyone)
        dealt = itertools.chain(order[self._count :], itertools.cycle(order))
        return itertools.islice(dealt, self.rank, len(self) * self.num_replicas, self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        self._distributed.set_epoch(epoch)


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, of which nothing is fetched.

    Args:
        batch_sampler: the batch sampler.
        skip_batches: how many batches to leave out.
    """

    # How many of the very first batches to keep in `kept` while it is iterated.
    keeps = 0
    kept: Sequence[list[Any]] = ()

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        # batch_size, drop_last, split_batches, num_processes ... are those of the wrapped one
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def counts(self, number: int) -> tuple[int, int] | None:
        """Count the samples of one of this process's batches, as `BatchSamplerShard.counts` does.

        Args:
            number: the number of the batch among those that are left.
        """
        counts = getattr(self.batch_sampler, "counts", None)
        return None if counts is None else counts(number if number == -1 else number + self.skip_batches)

    @property
    def missed_steps(self) -> int:
        """As in `BatchSamplerShard`: other processes, too, skip what they have more."""
        missed: int = getattr(self.batch_sampler, "missed_steps", 0)
        return missed and max(len(self.batch_sampler) + missed - self.skip_batches, 0) - len(self)

    @property
    def uneven(self) -> bool:
        """As in `BatchSamplerShard`."""
        uneven = getattr(self.batch_sampler, "uneven", False)
        return uneven and len(self.batch_sampler) + self.batch_sampler.missed_steps > self.skip_batches  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[list[Any]]:
        if can_jump(self.batch_sampler):
            self.kept = first_batches(self.batch_sampler, min(self.keeps, self.skip_batches))
            return batches_after(self.batch_sampler, self.skip_batches)
        # At once, not with the first batch: its order may be drawn here, before torch's loader draws a number.
        return self._left(iter(self.batch_sampler))

    def _left(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        self.kept = list(itertools.islice(batches, min(self.keeps, self.skip_batches)))
        yield from itertools.islice(batches, self.skip_batches - len(self.kept), None)

    @property
    def total_length(self) -> int:
        """The number of batches before skipping."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


# --- samplers that can start anywhere ---------------------------------------------------------------------------


def indices_after(sampler: Any, count: int) -> Iterator[Any]:
    """An iteration of a sampler without its first `count` indices."""
    if isinstance(sampler, SkipSampler):
        return indices_after(sampler.sampler, sampler.skip_samples + count)
    if isinstance(sampler, IndexedRandomSampler):
        return sampler.after(count)
    return itertools.islice(sampler, count, None)


def can_jump(batches: Any) -> bool:
    """Whether the batches after any number of others are found without a look at those."""
    if isinstance(batches, (BatchSamplerShard, SkipBatchSampler)):
        return can_jump(batches.batch_sampler)
    return cuts_in_order(batches) and isinstance(_innermost(batches.sampler)[0], IndexedRandomSampler)


def batches_after(batches: Any, count: int) -> Iterator[list[Any]]:
    """An iteration without the first `count` batches, of batches that can jump."""
    if isinstance(batches, SkipBatchSampler):
        return batches_after(batches.batch_sampler, batches.skip_batches + count)
    if isinstance(batches, BatchSamplerShard):
        inner, step = batches.batch_sampler, batches.batches_per_step
        return batches.iterate(batches_after(inner, count * step), count, first_batches(inner, step))
    sampler: Any = SkipSampler(batches.sampler, count * batches.batch_size)
    return iter(type(batches)(sampler, batches.batch_size, batches.drop_last))


def first_batches(batches: Any, count: int) -> list[list[Any]]:
    """The first batches, of batches that can jump; it is no iteration of them."""
    if isinstance(batches, SkipBatchSampler):
        return first_batches(batches.batch_sampler, batches.skip_batches + count)[batches.skip_batches :]
    if isinstance(batches, BatchSamplerShard):
        twin = copy.copy(batches)
        inside = first_batches(batches.batch_sampler, count * batches.batches_per_step)
        return list(itertools.islice(twin.iterate(iter(inside)), count))
    sampler, skipped = _innermost(batches.sampler)
    indices = itertools.islice(sampler.order(skipped), count * batches.batch_size)
    cut: Any = type(batches)(list(indices), batches.batch_size, batches.drop_last)
    return list(cut)


def _innermost(sampler: Any) -> tuple[Any, int]:
    """The sampler of which a first part is left out, and how many indices that has."""
    skipped = 0
    while isinstance(sampler, SkipSampler):
        sampler, skipped = sampler.sampler, skipped + sampler.skip_samples
    return sampler, skipped


def innermost_skip(batches: Any) -> SkipBatchSampler | None:
    """What leaves out the first batches of the epoch, if anything does."""
    found = None
    while isinstance(batches, SkipBatchSampler):
        found, batches = batches, batches.batch_sampler
    return found


def without_batches(batches: Any, count: int) -> Any:
    """What follows the first `count` batches; `batches` may be sharded."""
    if isinstance(batches, SamplerShard):
        return SamplerShard(batches.sampler, SkipBatchSampler(batches.shard, count))
    return SkipBatchSampler(batches, count)


def without_samples(batches: Any, count: int) -> Any:
    """The batches of what follows the first `count` samples; `batches` may be sharded."""
    if isinstance(batches, SamplerShard):
        return SamplerShard(SkipSampler(batches.sampler, count), without_samples(batches.shard, count))
    if isinstance(batches, BatchSamplerShard):
        twin = copy.copy(batches)
        twin.batch_sampler = without_samples(batches.batch_sampler, count)
        return twin
    if cuts_in_order(batches):
        # Of its own kind, since that of torchdata begins its order earlier, and loaders may tell it to more than once.
        return type(batches)(SkipSampler(batches.sampler, count), batches.batch_size, batches.drop_last)
    if isinstance(batches, KeptShard) and cuts_in_order(batches.batch_sampler):
        rest: Any = RestOfDistributed(batches.sampler, count)
        return KeptShard(BatchSampler(rest, batches.batch_size, batches.drop_last), rest)
    # A batch sampler of its own kind: whole batches, of the size it says they have.
    return SkipBatchSampler(batches, count // (getattr(batches, "batch_size", None) or 1))
