"""Where the loop over a loader stood, as a checkpoint holds it, and whether it matches another loader."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from accelerate.data_loader import order_rng
from accelerate.data_loader.epoch_part import DrawnStates
from accelerate.data_loader.indexed import IndexedRandomSampler
from accelerate.data_loader.samplers import SamplerShard, SeedableRandomSampler, cuts_in_order, sampler_owner
from accelerate.data_loader.skip_samplers import SkipSampler


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Where the loop over a loader stood. A checkpoint holds it as a dict of these names.

    Of the epoch that was being read, or else of the next one:
    epoch: its number. running: whether it was being read. inside: and this process had batches left of it.
    steps: how many steps were done. batches: how many of those were in batches of this run; samples: how many samples
    were in those before, of runs with other batches. partial: whether this run began in the middle of it.
    start: the random states that its order came from. dataset: the state of a dataset that has one.
    drawn: the random states of a dataset that draws.

    Of the time after it:
    after: the state of the dataset when the epoch is over. draws_next: whether torch's loader draws a seed for it.
    broken: the same as above, of an epoch that was left before its end, when none is being read.

    Of the loader:
    generators: the states of those that decide its order. seed: of a seedable sampler. order: the kind of sampler.
    batch: how many samples a step has. processes: how many processes share them. workers: how many read.
    """

    epoch: int
    draws_next: bool
    generators: list[torch.Tensor]
    seed: int | None
    batch: int
    processes: int
    workers: int
    running: bool = False
    inside: bool = False
    steps: int = 0
    batches: int = 0
    samples: int = 0
    partial: bool = False
    start: dict[str, Any] | None = None
    dataset: Any = None
    # The first versions of this format had none of these.
    drawn: DrawnStates | None = None
    after: Any = None
    broken: dict[str, Any] | None = None
    order: str | None = None

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Snapshot:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in state.items() if name in names})

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def next_epoch(self) -> Snapshot:
        """The same place; or the start of the next epoch, where that is what comes after it."""
        if self.inside:
            return self
        return dataclasses.replace(
            self,
            epoch=self.epoch + self.running,
            steps=0,
            batches=0,
            samples=0,
            start=None,
            dataset=None,
            drawn=None if self.drawn is None else {"before": {}, "workers": self.drawn["workers"]},
        )

    def last_epoch(self) -> Snapshot | None:
        """The end of a finished epoch, or where a loop left one early: a script may still return to it."""
        if self.running:
            return None if self.inside else self
        return None if self.broken is None else dataclasses.replace(self, **self.broken)

    def has_batches_of(self, loader: Any) -> bool:
        """Whether a step of the loader has as many samples, on as many processes, as a step had then."""
        return self.batch == loader.total_batch_size and self.processes == loader.num_shards

    def has_readers_of(self, loader: Any) -> bool:
        """Whether, besides, as many workers read them."""
        return self.has_batches_of(loader) and self.workers == loader.num_workers


# --- does a loader fit? -----------------------------------------------------------------------------------------

# Samplers that give different orders, of which no other one can follow the middle.
_ORDERS = (SequentialSampler, RandomSampler, SeedableRandomSampler, IndexedRandomSampler)


def innermost_sampler(loader: Any) -> Any:
    """The sampler of indices, underneath all batching, sharding and skipping."""
    owner = sampler_owner(loader)
    sampler = getattr(loader, "sampler", None) if owner is None else getattr(owner, "sampler", None)
    while isinstance(sampler, (SkipSampler, SamplerShard)):
        sampler = sampler.sampler
    return sampler


def order_of(loader: Any) -> str | None:
    """Which kind of sampler makes the order of a loader, where that is one of those that `prepare` knows."""
    kind = type(innermost_sampler(loader))
    return kind.__name__ if kind in _ORDERS else None


def other_order(saved: Snapshot, loader: Any) -> tuple[str, str] | None:
    """The orders of a place in the middle of an epoch and of a loader, where they are known and differ."""
    now = order_of(loader)
    known = saved.inside and saved.order is not None and now is not None
    return (saved.order, now) if known and saved.order != now else None  # type: ignore[return-value]


def can_go_on_by_itself(saved: Snapshot, loader: Any) -> bool:
    """Whether a stateful loader comes to its place when it loads its own state."""
    return not saved.partial and saved.has_readers_of(loader) and not _minds_iterating_twice(loader)


def _minds_iterating_twice(loader: Any) -> bool:
    """torchdata has a sampler iterate twice when it goes on from a state: one that shuffles at once gives out the
    second order."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    with suppress(Exception):  # one that cannot be iterated yet, before it is told the epoch, say
        return order_rng.makes_all_at_once(loader, loader.part.indices)
    return False


# --- in words ---------------------------------------------------------------------------------------------------


def change(saved: Snapshot, loader: Any) -> str | None:
    """What is different from when it was saved, in the middle of a sentence; None if nothing is."""
    if saved.has_batches_of(loader):
        return None
    saved = saved.next_epoch()
    old, new = saved.batch, loader.total_batch_size
    text = f"{saved.processes} processes and {old} samples per step became {loader.num_shards} and {new}"
    length = _length(loader)
    if length is not None:
        left = max(length - saved.samples - saved.batches * old, 0)
        drop_last = getattr(sampler_owner(loader), "drop_last", loader._drop_last)
        steps, before = (left // size if drop_last else -(-left // size) for size in (new, old))
        then = "as before" if steps == before else f"instead of {before}"
        text += f", so {steps} steps are left of epoch {saved.epoch} {then}"
    return text + _inexact(saved, loader)


def _length(loader: Any) -> int | None:
    """How many samples an epoch has, on all processes together: a sampler may give more or fewer than there are."""
    sampler, owner = innermost_sampler(loader), sampler_owner(loader)
    kept = isinstance(sampler, DistributedSampler) and sampler.num_replicas == loader.num_shards
    if isinstance(loader.dataset, IterableDataset) or kept:
        length: int | None = loader._known_length()
        return length
    with suppress(TypeError, NotImplementedError, AttributeError):  # an endless one, or batches of no certain size
        return len(sampler) if owner is None or cuts_in_order(owner) else len(owner) * int(owner.batch_size)
    return None


def _inexact(saved: Snapshot, loader: Any) -> str:
    """A word of warning where some of the remaining samples may come twice or not at all."""
    if isinstance(loader.dataset, IterableDataset):
        if not loader.num_workers:
            return ""
        return " (worker processes read its dataset: the last samples before the checkpoint may come a second time)"
    owner = sampler_owner(loader)
    if owner is None or cuts_in_order(owner):
        sampler = innermost_sampler(loader)
        if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is DistributedSampler.__iter__:
            return ""
        return f" (only its {type(sampler).__name__} knows which samples were seen: some may come twice or not at all)"
    if saved.batch * loader.num_shards == loader.total_batch_size * saved.processes:
        return ""  # the same batches, given to more or fewer processes
    return f" (its {type(owner).__name__} now makes other batches: some samples may come twice or not at all)"
