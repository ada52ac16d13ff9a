"""How the next iteration of a loader starts when a checkpoint was loaded."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate.data_loader import order_rng
from accelerate.data_loader.dataset_rng import Reader, Replay
from accelerate.data_loader.epoch_part import EpochPart, PositionedLoader
from accelerate.data_loader.iterable import IterableDatasetShard
from accelerate.data_loader.samplers import RANDOM_SAMPLERS, SeedableRandomSampler, sampler_owner
from accelerate.data_loader.snapshot import Snapshot, innermost_sampler


class Resume:
    """What the next iteration of a loader follows, until it has its first batch.

    saved: what was loaded. goal: where to go, in the interrupted epoch or the one that comes next.
    skips: whether the iteration starts there, and not at the start of that epoch.
    by_itself: whether a stateful loader comes there by loading a state of its own.
    same_batches: whether a step has the same samples as then.
    start: the random states that the order of the epoch came from, where it has begun. rng: those of a dataset that
    draws, if they are of use here. ended: a dataset that stands behind the last sample of an epoch.
    """

    def __init__(
        self, saved: Snapshot, goal: Snapshot, loader: PositionedLoader, *, skips: bool, by_itself: bool
    ) -> None:
        self.saved = saved
        self.goal = goal
        self.skips = skips and goal.steps > 0
        self.by_itself = by_itself
        self.same_batches = goal.has_batches_of(loader)
        self.rng = goal.drawn if goal.has_readers_of(loader) else None
        self.ended: EndedDataset | None = None
        self.start = _follow_order(goal, loader)
        # While the first batch is fetched: the random states to go on with.
        self._loaded: dict[str, Any] | None = None

    def part(self, loader: PositionedLoader) -> EpochPart:
        """What of the epoch is read."""
        if not self.skips:
            return loader.part
        goal, whole = self.goal, loader.whole_epoch
        samples, batches = goal.samples, goal.batches
        dataset = dataset_to_move(loader)
        if dataset is not None and goal.dataset is not None:
            dataset.load_state_dict(goal.dataset)
            part = whole.from_here(samples + batches * goal.batch)
        else:
            if not self.same_batches:
                samples, batches = samples + batches * goal.batch, 0
            part = whole.after_samples(samples, loader.total_batch_size) if samples else whole
            part = part.after_steps(batches, loader.batches_per_step) if batches else part
        return replace(part, steps=goal.steps, rng=self.rng)

    def part_after(self, count: int, loader: PositionedLoader) -> EpochPart:
        """What is left when a script skips `count` steps by itself: not twice what would be skipped anyway."""
        if self.skips and count in (self.goal.steps, self.goal.batches):
            part = self.part(loader)
        else:
            part = loader.part.after_steps(count, loader.batches_per_step)
            if self.saved.inside and self.saved.steps == count:
                part = replace(part, rng=self.rng)
        self.skips = False
        return part

    def rewind(self, loader: PositionedLoader) -> None:
        """Put the random states back to where the interrupted epoch began, until its first batch is there."""
        if self.start is not None:
            self._loaded = order_rng.random_states(loader)
            order_rng.set_generators(loader, self.start["generators"])
            order_rng.set_global_states(self.start)

    def caught_up(self, loader: PositionedLoader, part: EpochPart) -> None:
        """The first batch is there, or an error: random states are again those that the checkpoint has brought."""
        if self._loaded is None:
            return
        order_rng.set_global_states(self._loaded)
        # A generator may be shared with another loader. It stays where it is if the order is still being drawn, and not
        # from the place where it was when the checkpoint was saved.
        if order_rng.draws_at_once(innermost_sampler(loader)) or (self.same_batches and part.steps):
            order_rng.set_generators(loader, self._loaded["generators"])
        self._loaded = None

    def replaying(self, reader: Reader, loader: PositionedLoader, part: EpochPart) -> Reader:
        """A reader, for a loop that leaves out by itself what was done: with the random states of then, if need be."""
        steps = self.goal.steps - part.steps if self.same_batches and self.start is not None else 0
        before = {} if self.rng is None else self.rng["before"]
        # Beside workers only a sampler draws in this process, and it is not known from what.
        names = order_rng.NAMES if loader.num_workers else tuple(before)
        if steps <= 0 or not names or loader.use_stateful_dataloader:
            return reader
        return Replay(reader, steps, names, before)


def _follow_order(goal: Snapshot, loader: PositionedLoader) -> dict[str, Any] | None:
    """Have a loader shuffle as the one of the checkpoint; returns the random states that the epoch began with."""
    loader.iteration = goal.epoch
    sampler, start = innermost_sampler(loader), goal.start
    if isinstance(sampler, SeedableRandomSampler) and goal.seed is not None:
        sampler.initial_seed = goal.seed
    if goal.generators and not order_rng.generators(loader) and isinstance(sampler, RANDOM_SAMPLERS):
        sampler.generator = torch.Generator()  # several processes shuffled by one; a single one has none
    elif start is not None and not goal.generators and isinstance(sampler, RANDOM_SAMPLERS):
        batches = sampler_owner(loader)
        at_once = batches is not None and order_rng.makes_all_at_once(loader, batches)
        start = {**start, "generators": [order_rng.state_of_one(start, sampler, at_once)]}
    order_rng.set_generators(loader, goal.generators)
    return start


# --- datasets that have a state -----------------------------------------------------------------------------------


def dataset_to_move(loader: PositionedLoader) -> Any:
    """The iterable dataset of a loader, where this process reads it and it can tell its place and go there."""
    if loader.use_stateful_dataloader or not isinstance(loader.dataset, IterableDataset):
        return None
    return stateful_dataset(loader)


def stateful_dataset(loader: PositionedLoader) -> Any:
    """The dataset of a loader, where this process reads it and it has a state."""
    dataset = loader.dataset
    dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
    has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return dataset if has_state and not loader.num_workers else None


def state_of(dataset: Any) -> Any:
    with suppress(Exception):  # one that cannot tell now, before it was read or where another process reads it
        return None if dataset is None else copy.deepcopy(dataset.state_dict())
    return None


class EndedDataset:
    """An iterable dataset that was put where it was behind the last sample of an epoch."""

    def __init__(self, dataset: Any, beginning: Any) -> None:
        self._dataset = dataset
        self._beginning = beginning

    @classmethod
    def restored(cls, dataset: Any, state: Any, *, iterable: bool) -> EndedDataset | None:
        """Have a dataset load its state of the end of an epoch; None if it takes no such state, and begins anew."""
        beginning = state_of(dataset)
        with suppress(Exception):
            dataset.load_state_dict(copy.deepcopy(state))
            return cls(dataset, beginning) if iterable else None
        return None

    def next_epoch(self, batches: Iterator[Any], iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the epoch that follows. iterate: begins another iteration."""
        for tries in range(2):
            for first in batches:
                return itertools.chain([first], batches)
            # It has gone on from there, to find nothing. After that it begins anew, or as soon as it is told to.
            if tries and self._beginning is not None:
                self._dataset.load_state_dict(self._beginning)
            batches = iterate()
        return batches
