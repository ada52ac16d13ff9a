"""An epoch: the part of it that is read, the loop over that, and where the loop stood when it was saved."""

from __future__ import annotations

import copy
import functools
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from accelerate.data_loader.indexed import IndexedRandomSampler
from accelerate.data_loader.iterable import IterableDatasetShard, SkippedDataset, without_first_samples
from accelerate.data_loader.samplers import (
    SamplerShard,
    SeedableRandomSampler,
    cuts_in_order,
    sampler_in_use,
    sampler_owner,
)
from accelerate.data_loader.skip_samplers import SkipSampler
from accelerate.data_loader.torch_loaders import (
    kept_arguments,
    same_batches,
    skipped_batches,
    skipped_samples,
    stateful_loader,
)

if TYPE_CHECKING:
    from accelerate.data_loader.base import PreparedLoader
    from accelerate.data_loader.position import Resume

RngStates = dict[str, Any]  # by the name of the global generator: "python", "numpy", "torch"


class DrawnStates(TypedDict):
    """The random states of a dataset that draws from global generators.

    before: of this process, when the batches were read that were not handed out yet.
    workers: by worker, after its last batch that was handed out.
    """

    before: RngStates
    workers: dict[int, RngStates]


@dataclass(frozen=True, eq=False)
class EpochPart:
    """A whole epoch, or what is left of one when some of it was read already.

    torch_loader: reads it. Its sampler or dataset leaves out what was read before, where that is possible.
    skip_batches: where it is not, how many steps to read and throw away.
    whole: whether it is an epoch as `prepare` made it, and nothing was asked to be left out.
    samples: how many samples were read before it in batches of another size. batches: how many steps after those.
    steps: in how many steps all of that was read.
    drawn: what the dataset drew from then, where a loaded checkpoint knows it.
    """

    torch_loader: Any
    skip_batches: int = 0
    whole: bool = True
    samples: int = 0
    batches: int = 0
    steps: int = 0
    drawn: DrawnStates | None = None

    @functools.cached_property
    def is_iterable(self) -> bool:
        return isinstance(self.torch_loader.dataset, IterableDataset)

    @functools.cached_property
    def indices(self) -> Any:
        """What decides the batches of the torch loader: its batch sampler or, without one, its sampler."""
        torch_loader = self.torch_loader
        return torch_loader.sampler if torch_loader.batch_sampler is None else torch_loader.batch_sampler

    @property
    def dataset(self) -> Any:
        """The dataset of the script, of which this process may read a share."""
        dataset = self.torch_loader.dataset
        return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset

    @functools.cached_property
    def shard(self) -> Any:
        """What decides which samples this process gets."""
        if not self.is_iterable:
            return self.indices
        dataset = self.torch_loader.dataset
        return dataset if isinstance(dataset, IterableDatasetShard) else self.torch_loader

    @functools.cached_property
    def sampler_owner(self) -> Any:
        """The batch sampler that has the sampler of indices as its `sampler`; None where there is none."""
        return sampler_owner(self.torch_loader)

    @property
    def sampler(self) -> Any:
        """The sampler of indices, which decides the order: underneath all batching, sharding and skipping."""
        sampler = sampler_in_use(self.torch_loader)
        while isinstance(sampler, (SkipSampler, SamplerShard)):
            sampler = sampler.sampler
        return sampler

    def set_epoch(self, epoch: int) -> None:
        """Tell everything that knows of epochs which one this is: what makes batches, the sampler, the dataset."""
        batches = None if self.is_iterable else self.indices
        while batches is not None:
            if hasattr(batches, "set_epoch"):
                batches.set_epoch(epoch)
            batches = getattr(batches, "batch_sampler", None)
        for one in (self.sampler, self.torch_loader.dataset):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    @property
    def total_length(self) -> int:
        """How many samples the dataset has, on all processes together."""
        known = getattr(self.torch_loader.dataset, "total_length", None)
        return len(self.dataset) if known is None else int(known)

    @property
    def samples_left(self) -> int | None:
        """How many samples this part has but for whole batches that are left out; None if that is not known."""
        try:
            # A dataset that leaves samples out by itself tells the length of the rest.
            return max(self.total_length - (0 if isinstance(self.dataset, SkippedDataset) else self.samples), 0)
        except (TypeError, NotImplementedError):  # a dataset without a length
            return None

    def after_steps(self, count: int, batches_per_step: int) -> EpochPart:
        """The same part without its first `count` steps."""
        skipped = skipped_batches(self.torch_loader, count * batches_per_step)
        return replace(
            self,
            torch_loader=self._reading(skipped or same_batches(self.torch_loader)),
            skip_batches=self.skip_batches + (count if skipped is None else 0),
            whole=False,
            batches=self.batches + count,
            steps=self.steps + count,
        )

    def after_samples(self, count: int, total_batch_size: int) -> EpochPart:
        """The same part without its first `count` samples, over all processes, which were in batches of any size."""
        dataset, batches, skip_batches = self.torch_loader.dataset, same_batches(self.torch_loader), 0
        if not self.is_iterable:
            batches = skipped_samples(self.torch_loader, count)
        elif self.torch_loader.num_workers == 0:
            dataset = without_first_samples(dataset, count)
        else:
            # Only the workers know whose sample is the next one: whole steps, and rather one sample twice than none.
            skip_batches = count // total_batch_size
        torch_loader = self._reading(batches, dataset)
        samples = self.samples + count
        return replace(self, torch_loader=torch_loader, skip_batches=skip_batches, whole=False, samples=samples)

    def from_here(self, samples: int) -> EpochPart:
        """What is left when the dataset itself stands behind its first `samples` samples already."""
        torch_loader = self._reading(same_batches(self.torch_loader))
        return replace(self, torch_loader=torch_loader, skip_batches=0, whole=False, samples=self.samples + samples)

    def again(self, indices: Any = None, **changes: Any) -> EpochPart:
        """The same part, read by another torch loader, with other arguments. indices: or batches of them, in place of
        those that the torch loader has."""
        batches = same_batches(self.torch_loader)
        if indices is not None:
            batches["batch_sampler" if "batch_sampler" in batches else "sampler"] = indices
        return replace(self, torch_loader=self._reading(batches, **changes))

    def _reading(self, batches: dict[str, Any], dataset: Any = None, **changes: Any) -> Any:
        base = self.torch_loader
        make = DataLoader if type(base) is DataLoader else stateful_loader
        return make(base.dataset if dataset is None else dataset, **(kept_arguments(base) | changes), **batches)


@dataclass(eq=False)
class EpochLoop:
    """One loop over a part of an epoch.

    resume: how it starts after a checkpoint was loaded; None as soon as its first batch is there.
    start: where the order of the epoch came from: the random states by their names; under `draws` whether torch's
    loader drew the seed of its workers then; under `workers` the random states of workers that stay.
    workers_stay: whether they stay for the next epoch.
    samples: how many were done before in batches of another size. earlier: in how many steps.
    batches: how many were handed out after those, in this loop or in the one that it continues.
    partial: whether it began in the middle of the epoch. finished: whether its last batch was handed out.
    moved_dataset: a dataset that can be moved to its place. dataset: its state when the batch at hand was fetched.

    Of a dataset that draws from global generators:
    first_rng: the random states to read the first batch with.
    before: the random states with which the batches were read that are fetched and not handed out.
    workers: by worker, its random states after its last batch that was handed out.
    turn: how many batches of a resumed epoch were dealt out to workers before.
    """

    part: EpochPart
    epoch: int
    resume: Resume | None
    start: dict[str, Any]
    workers_stay: bool
    samples: int
    batches: int
    earlier: int
    partial: bool
    moved_dataset: Any = None
    finished: bool = False
    dataset: Any = None
    first_rng: RngStates = field(default_factory=dict)
    before: RngStates = field(default_factory=dict)
    workers: dict[int, RngStates] = field(default_factory=dict)
    turn: int = 0

    def fetched(self) -> None:
        """The batch at hand was fetched, and the next one is about to be."""
        if self.moved_dataset is not None:
            self.dataset = copy.deepcopy(self.moved_dataset.state_dict())

    def progress(self) -> dict[str, Any]:
        """What a snapshot says of it."""
        return {
            "epoch": self.epoch,
            "running": True,
            "inside": not self.finished,
            "steps": self.earlier + self.batches,
            "batches": self.batches,
            "samples": self.samples,
            "partial": self.partial,
            "start": self.start,
            "dataset": self.dataset,
            "drawn": {"before": self.before, "workers": dict(self.workers)},
        }


# --- where the loop stood -----------------------------------------------------------------------------------------


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
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in state.items() if name in names})

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def resume_point(self) -> Snapshot:
        """The same place; or the start of the next epoch, where the saved one is over."""
        if self.inside:
            return self
        return replace(
            self,
            epoch=self.epoch + self.running,
            steps=0,
            batches=0,
            samples=0,
            start=None,
            dataset=None,
            drawn=None if self.drawn is None else {"before": {}, "workers": self.drawn["workers"]},
        )

    def ended_or_left(self) -> Snapshot | None:
        """The end of a finished epoch, or where a loop left one early: a script may still return to it."""
        if self.running:
            return None if self.inside else self
        return None if self.broken is None else replace(self, **self.broken)

    def has_batches_of(self, loader: PreparedLoader) -> bool:
        """Whether a step of the loader has as many samples, on as many processes, as a step had then."""
        return self.batch == loader.total_batch_size and self.processes == loader.num_shards

    def has_readers_of(self, loader: PreparedLoader) -> bool:
        """Whether, besides, as many workers read them."""
        return self.has_batches_of(loader) and self.workers == loader.num_workers


# --- does a loader fit? -----------------------------------------------------------------------------------------

# Samplers that give different orders, of which no other one can follow the middle.
_ORDERS = (SequentialSampler, RandomSampler, SeedableRandomSampler, IndexedRandomSampler)


def order_of(loader: PreparedLoader) -> str | None:
    """Which kind of sampler makes the order of a loader, where that is one of those that `prepare` knows."""
    kind = type(loader.part.sampler)
    return kind.__name__ if kind in _ORDERS else None


def other_order(saved: Snapshot, loader: PreparedLoader) -> tuple[str, str] | None:
    """The orders of a place in the middle of an epoch and of a loader, where they are known and differ."""
    now = order_of(loader)
    known = saved.inside and saved.order is not None and now is not None
    return (saved.order, now) if known and saved.order != now else None  # type: ignore[return-value]


# --- in words ---------------------------------------------------------------------------------------------------


def change(saved: Snapshot, loader: PreparedLoader) -> str | None:
    """What became of the batches that are left, in the middle of a sentence; None if they are the same, or all come."""
    if saved.has_batches_of(loader) or other_order(saved, loader) is not None:
        return None
    saved = saved.resume_point()
    old, new = saved.batch, loader.total_batch_size
    processes = "1 process" if saved.processes == 1 else f"{saved.processes} processes"
    counted = "batches" if getattr(loader.part.shard, "batch_size", None) is None else "samples"
    text = f"{processes} with {old} {counted} per step became {loader.num_shards} with {new}"
    length = _length(loader)
    if length is not None:
        left = max(length - saved.samples - saved.batches * old, 0)
        drop_last = getattr(loader.part.sampler_owner, "drop_last", loader.part.torch_loader.drop_last)
        steps, before = (left // size if drop_last else -(-left // size) for size in (new, old))
        then = "as before" if steps == before else f"instead of {before}"
        text += f", so {steps} steps are left of epoch {saved.epoch} {then}"
    return text + _inexact(saved, loader)


def _length(loader: PreparedLoader) -> int | None:
    """How many samples an epoch has, on all processes together: a sampler may give more or fewer than there are."""
    sampler, owner = loader.part.sampler, loader.part.sampler_owner
    kept = isinstance(sampler, DistributedSampler) and sampler.num_replicas == loader.num_shards
    if isinstance(loader.dataset, IterableDataset) or kept:
        return loader.whole_epoch.samples_left
    with suppress(TypeError, NotImplementedError, AttributeError):  # an endless one, or batches of no certain size
        return len(sampler) if owner is None or cuts_in_order(owner) else len(owner) * int(owner.batch_size)
    return None


def _inexact(saved: Snapshot, loader: PreparedLoader) -> str:
    """A word of warning where some of the remaining samples may come twice or not at all."""
    if isinstance(loader.dataset, IterableDataset):
        if not loader.num_workers:
            return ""
        return " (worker processes read its dataset: the last samples before the checkpoint may come a second time)"
    owner = loader.part.sampler_owner
    if owner is None or cuts_in_order(owner):
        sampler = loader.part.sampler
        if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is DistributedSampler.__iter__:
            return ""
        return f" (only its {type(sampler).__name__} knows which samples were seen: some may come twice or not at all)"
    if saved.batch * loader.num_shards == loader.total_batch_size * saved.processes:
        return ""  # the same batches, given to more or fewer processes
    return f" (its {type(owner).__name__} now makes different batches: some samples may come twice or not at all)"
