"""Where the loops over a loader stand: a small state machine, with its drawing in docs/architecture.md.

    BETWEEN ----- begin ----> READING ----- end of the last batch ----> BETWEEN
    LEFT -------- begin ----> READING ----- `break`, an error --------> LEFT
    any phase --- load -----> LOADED
    LOADED ------ begin ----> RESUMING ---- the first batch is there -> READING

A `Snapshot` is what a checkpoint holds of it. A `Resume` is what a loaded snapshot makes of the next iteration.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from accelerate.data_loader import rng
from accelerate.data_loader.epoch import (
    DrawnStates,
    EpochLoop,
    EpochPart,
    RngStates,
    Snapshot,
    order_of,
    other_order,
)
from accelerate.data_loader.readers import Reader, Replay, open_reader
from accelerate.data_loader.samplers import RANDOM_SAMPLERS, SeedableRandomSampler
from accelerate.random import NAMES, set_global_states
from accelerate.state import ending

if TYPE_CHECKING:
    from accelerate.data_loader.base import PreparedLoader

# Of a dataset, an attribute with more items than this is its data.
_FEW = 1000


class Phase(Enum):
    """What is going on with a loader.

    `Position.phase` says how each follows from what a position holds.
    """

    BETWEEN = "nothing is read: before the first epoch, or after the last batch of one"
    READING = "a loop has a batch of it"
    LEFT = "nothing is read, and the last loop was left before its last batch"
    LOADED = "nothing is read, and a checkpoint says where the next iteration starts"
    RESUMING = "the first batch of that iteration is fetched, with the random states that its order came from"


class Way(Enum):
    """How a loader comes to its place in an epoch."""

    BY_ITSELF = "a stateful loader loads a state of its own"
    SKIPS = "what was read before the checkpoint is skipped"
    RESTARTS = "it does not: the epoch starts again"


class Position:
    """Where the loops over a loader stand; it is shared with the loaders that `skip_first_batches` makes of it.

    exact_resume: the setting of that name: whether a loop goes on in the middle of an epoch, for which the state of a
    dataset that can be moved is kept after each batch.
    trains: whether the last loop called `backward` for its batches.
    """

    exact_resume = False
    trains = False

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        # READING, RESUMING: the last one has the batch at hand, the others are the loops around it.
        self._running: list[EpochLoop] = []
        # LEFT: the progress of the iteration that was left.
        self._left: dict[str, Any] | None = None
        # LOADED
        self._resume: Resume | None = None
        # What one epoch leaves for the next. From which global generators the dataset draws in this process:
        self._drawn_from: set[str] = set()
        # The random states of workers that stay; and the reader of their last epoch, until it was asked for them.
        self._workers: dict[int, RngStates] = {}
        self._reader: Reader | None = None
        # Whether torch's loader draws a seed for the next epoch, where a checkpoint says so.
        self._next_draws_base_seed: bool | None = None

    @property
    def phase(self) -> Phase:
        """Derived from `_resume` (LOADED), `_running` (READING, RESUMING) and `_left` (LEFT)."""
        if self._resume is not None:
            return Phase.LOADED
        if self._running:
            return Phase.READING if self._running[-1].resume is None else Phase.RESUMING
        return Phase.BETWEEN if self._left is None else Phase.LEFT

    # --- an iteration -------------------------------------------------------------------------------------------

    def begin(self, loader: PreparedLoader) -> EpochLoop:
        """A loop begins: in a whole epoch, in the rest of one, or where a loaded checkpoint says."""
        resume, self._resume, self._left = self._resume, None, None
        part, draws_base_seed = loader.part, None
        if resume is not None:
            part = resume.part(loader)
            draws_base_seed = None if resume.start is None else resume.start["draws"]
            resume.rewind(loader)
        loader.start_epoch(part)
        if part.whole:
            if draws_base_seed is None:
                draws_base_seed = self._next_draws_base_seed
            self._next_draws_base_seed = None
        # Where a script skips without a checkpoint, the rest of an epoch has workers of its own.
        stay = loader.persistent_workers and (part.whole or part.drawn is not None)
        start = rng.random_states(loader)
        start["draws"] = rng.makes_iterator(loader, part) if draws_base_seed is None else draws_base_seed
        start["workers"] = self._states_of_workers() if stay else {}
        loop = EpochLoop(
            part,
            loader.iteration,
            resume,
            start,
            stay,
            samples=part.samples,
            batches=part.batches,
            earlier=part.steps - part.batches,
            partial=part.steps > 0,
            moved_dataset=dataset_to_move(loader) if self.exact_resume and part.is_iterable else None,
            workers=dict(start["workers"]),
        )
        if resume is not None:
            self._go_on(loop, resume, loader)
        self._running.append(loop)
        return loop

    def _go_on(self, loop: EpochLoop, resume: Resume, loader: PreparedLoader) -> None:
        """Tell an iteration what the interrupted one knew."""
        drawn = loop.part.drawn
        if resume.way is Way.BY_ITSELF and loop.part.whole:
            goal, drawn = resume.goal, resume.drawn
            loop.samples, loop.batches = goal.samples, goal.batches
            loop.earlier, loop.partial = goal.steps - goal.batches, goal.partial
        if drawn is not None:
            loop.first_rng, loop.workers = drawn["before"], dict(drawn["workers"])
            loop.turn = loop.part.batches * loader.batches_per_step

    def start_reading(self, loader: PreparedLoader, loop: EpochLoop) -> Reader:
        """Have torch's loader begin the iteration."""
        resume, known = loop.resume, self._drawn_from
        if loader.num_workers and rng.makes_iterator(loader, loop.part):
            ending.let_threads_finish(naps=5)  # workers are forked
        reader = open_reader(loader, loop, known, draws_base_seed=loop.start["draws"])
        if loop.workers_stay:
            self._reader = reader
        if resume is None:
            return reader
        if resume.ended is not None:
            reader.batches = resume.ended.next_epoch(
                reader.batches, lambda: open_reader(loader, loop, known, draws_base_seed=False).batches
            )
        return resume.replaying(reader, loader, loop.part)

    def caught_up(self, loader: PreparedLoader, loop: EpochLoop) -> None:
        """The first batch is there, or there is none."""
        if loop.resume is not None:
            loop.resume.caught_up(loader, loop.part)
            loop.resume = None

    def current(self) -> EpochLoop | None:
        """The iteration that the batch at hand is of."""
        return self._running[-1] if self._running else None

    def end(self, loop: EpochLoop) -> bool:
        """An iteration is over; whether it still was one of this run, and no checkpoint has been loaded meanwhile."""
        if loop not in self._running:
            return False
        self._running.remove(loop)
        self._left = None if loop.finished else loop.progress()
        if loop.workers_stay:
            self._workers = loop.workers
        return True

    def part_after(self, count: int, loader: PreparedLoader) -> EpochPart:
        """What `skip_first_batches` leaves of an epoch: not twice what would be skipped anyway."""
        resume = self._resume
        if resume is None:
            return loader.part.after_steps(count, loader.batches_per_step)
        last = resume.saved.ended_or_left()
        if last is not None and count and count == last.steps:
            resume = self._follow(Resume(resume.saved, last, loader, Way.SKIPS))
        return resume.part_after(count, loader)

    # --- saving and loading -------------------------------------------------------------------------------------

    def snapshot(self, loader: PreparedLoader) -> Snapshot:
        """Where the loop stands."""
        generators = rng.generator_states(loader)
        if self._resume is not None:  # nothing was read since
            saved = self._resume.saved
            alike = len(generators) == len(saved.generators)
            return replace(saved, generators=generators) if alike else saved
        sampler, loop = loader.part.sampler, self.current()
        if loop is None:
            drawn: DrawnStates = {"before": {}, "workers": dict(self._states_of_workers())}
            progress: dict[str, Any] = {"epoch": loader.iteration, "drawn": drawn}
        else:
            progress = loop.progress()
        over = loop is None or loop.finished
        draws_next = self._next_draws_base_seed
        # An iterable dataset that was left in its middle would go on from there, where the next epoch begins again.
        left = loop is None and self._left is not None and isinstance(loader.dataset, IterableDataset)
        return Snapshot(
            **progress,
            broken=self._left if loop is None else None,
            after=state_of(self._ended_dataset(loader)) if over and not left else None,
            draws_next=rng.makes_iterator(loader, loader.part) if draws_next is None else draws_next,
            generators=generators,
            seed=sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            batch=loader.total_batch_size,
            processes=loader.num_shards,
            workers=loader.num_workers,
            order=order_of(loader),
        )

    def check(self, saved: Snapshot, loader: PreparedLoader, own_state: Any = None) -> None:
        """Raise what the dataset raises that is given the state with which the next iteration begins, after `load`.

        Only a twin of it is. Datasets of worker processes are not asked: that would take workers.
        """
        if loader.num_workers or not saved.inside:
            return
        way = self._way(saved, loader, own_state)
        if way is Way.BY_ITSELF:
            dataset, state = loader.dataset, own_state.get("dataset_state")  # as torchdata calls it
        else:
            dataset, state = dataset_to_move(loader), saved.dataset if way is Way.SKIPS else None
        if state is not None and (twin := _twin(dataset)) is not None:
            twin.load_state_dict(copy.deepcopy(state))

    def _way(self, saved: Snapshot | None, loader: PreparedLoader, own_state: Any) -> Way:
        has_own = own_state is not None and loader.use_stateful_dataloader
        if has_own and (saved is None or _can_go_on_by_itself(saved, loader)):
            return Way.BY_ITSELF
        return Way.SKIPS if has_own or self.exact_resume else Way.RESTARTS

    def load(self, saved: Snapshot | None, loader: PreparedLoader, own_state: Any = None) -> Way:
        """Have the next iteration follow the interrupted one. Returns how it comes to its place there.

        saved: None where a checkpoint has none. own_state: what a stateful loader said of itself, in a file of its own.
        """
        way = self._way(saved, loader, own_state)
        if way is Way.BY_ITSELF:
            loader.load_state_dict(own_state)
        else:
            loader.forget_state()
        running = self._running
        self._reset()  # also what an earlier checkpoint has said
        if saved is None:
            self._running = running  # nothing is known of another place: a running loop continues
            return way
        if loader.persistent_workers:
            loader.forget_workers()  # new ones start with the states that are loaded
        if other_order(saved, loader) is not None:
            loader.iteration = saved.epoch  # which begins again: its middle is no place in this order
            return way
        if not saved.inside:
            loader.forget_state()  # a stateful loader would go on with an epoch that is over
        self._next_draws_base_seed = saved.draws_next
        resume = self._follow(Resume(saved, saved.resume_point(), loader, way))
        dataset = None if saved.inside or saved.after is None else self._ended_dataset(loader)
        if dataset is not None:
            iterable = isinstance(loader.dataset, IterableDataset)
            resume.ended = EndedDataset.restored(dataset, saved.after, iterable=iterable)
        return way

    def _follow(self, resume: Resume) -> Resume:
        self._resume = resume
        if resume.drawn is not None:
            self._drawn_from = set(resume.drawn["before"])
            self._workers = resume.drawn["workers"] if resume.start is None else resume.start["workers"]
        return resume

    def _states_of_workers(self) -> dict[int, RngStates]:
        """Those of workers that stay, between two iterations."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.drain()
        return self._workers

    def _ended_dataset(self, loader: PreparedLoader) -> Any:
        """The dataset that has a state from one epoch to the next, and is read here."""
        if loader.use_stateful_dataloader:
            return stateful_dataset(loader)
        return dataset_to_move(loader) if self.exact_resume else None


class Resume:
    """What the next iteration of a loader follows, until it has its first batch.

    saved: what was loaded. goal: where to go, in the interrupted epoch or the one that comes next.
    way: how the loader comes there. skips: whether it skips anything.
    same_batches: whether a step has the same samples as then.
    start: the random states that the order of the epoch came from, where it has begun. drawn: those of a dataset
    that draws, if they are of use here. ended: a dataset that stands behind the last sample of an epoch.
    """

    def __init__(self, saved: Snapshot, goal: Snapshot, loader: PreparedLoader, way: Way) -> None:
        self.saved = saved
        self.goal = goal
        self.way = way
        self.skips = way is Way.SKIPS and goal.steps > 0
        self.same_batches = goal.has_batches_of(loader)
        self.drawn = goal.drawn if goal.has_readers_of(loader) else None
        self.ended: EndedDataset | None = None
        self.start = _follow_order(goal, loader)
        # While the first batch is fetched: the random states to go on with.
        self._loaded: dict[str, Any] | None = None

    def part(self, loader: PreparedLoader) -> EpochPart:
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
        return replace(part, steps=goal.steps, drawn=self.drawn)

    def part_after(self, count: int, loader: PreparedLoader) -> EpochPart:
        """What is left when a script skips `count` steps by itself: not twice what would be skipped anyway."""
        if self.skips and count in (self.goal.steps, self.goal.batches):
            part = self.part(loader)
        else:
            part = loader.part.after_steps(count, loader.batches_per_step)
            if self.saved.inside and self.saved.steps == count:
                part = replace(part, drawn=self.drawn)
        self.skips = False
        return part

    def rewind(self, loader: PreparedLoader) -> None:
        """Put the random states back to where the interrupted epoch began, until its first batch is there."""
        if self.start is not None:
            self._loaded = rng.random_states(loader)
            rng.set_generators(loader, self.start["generators"])
            set_global_states(self.start)

    def caught_up(self, loader: PreparedLoader, part: EpochPart) -> None:
        """The first batch is there, or an error: random states are again those that the checkpoint has brought."""
        if self._loaded is None:
            return
        set_global_states(self._loaded)
        # A generator may be shared with another loader. It stays where it is if the order is still being drawn, and not
        # from the place where it was when the checkpoint was saved.
        if rng.draws_at_once(loader.part.sampler) or (self.same_batches and part.steps):
            rng.set_generators(loader, self._loaded["generators"])
        self._loaded = None

    def replaying(self, reader: Reader, loader: PreparedLoader, part: EpochPart) -> Reader:
        """A reader, for a loop that leaves out by itself what was done: with the random states of then, if need be."""
        steps = self.goal.steps - part.steps if self.same_batches and self.start is not None else 0
        before = {} if self.drawn is None else self.drawn["before"]
        # Beside workers only a sampler draws in this process, and it is not known from what.
        names = NAMES if loader.num_workers else tuple(before)
        if steps <= 0 or not names or loader.use_stateful_dataloader:
            return reader
        return Replay(reader, steps, names, before)


def _can_go_on_by_itself(saved: Snapshot, loader: PreparedLoader) -> bool:
    """Whether a stateful loader comes to its place when it loads its own state."""
    return not saved.partial and saved.has_readers_of(loader) and not _minds_iterating_twice(loader)


def _minds_iterating_twice(loader: PreparedLoader) -> bool:
    """torchdata has a sampler iterate twice when it goes on from a state: one that shuffles at once gives out the
    second order."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    with suppress(Exception):  # one that cannot be iterated yet, before it is told the epoch, say
        return rng.makes_all_at_once(loader, loader.part.indices)
    return False


def _follow_order(goal: Snapshot, loader: PreparedLoader) -> dict[str, Any] | None:
    """Have a loader shuffle as the one of the checkpoint; returns the random states that the epoch began with."""
    loader.iteration = goal.epoch
    sampler, start = loader.part.sampler, goal.start
    if isinstance(sampler, SeedableRandomSampler) and goal.seed is not None:
        sampler.initial_seed = goal.seed
    if goal.generators and not rng.generators(loader) and isinstance(sampler, RANDOM_SAMPLERS):
        sampler.generator = torch.Generator()  # several processes shuffled by one; a single one has none
    elif start is not None and not goal.generators and isinstance(sampler, RANDOM_SAMPLERS):
        batches = loader.part.sampler_owner
        at_once = batches is not None and rng.makes_all_at_once(loader, batches)
        start = {**start, "generators": [rng.state_of_one(start, sampler, at_once)]}
    rng.set_generators(loader, goal.generators)
    return start


# --- datasets that have a state -----------------------------------------------------------------------------------


def dataset_to_move(loader: PreparedLoader) -> Any:
    """The iterable dataset of a loader, where this process reads it and it can tell its place and go there."""
    if loader.use_stateful_dataloader or not isinstance(loader.dataset, IterableDataset):
        return None
    return stateful_dataset(loader)


def stateful_dataset(loader: PreparedLoader) -> Any:
    """The dataset of a loader, where this process reads it and it has a state."""
    dataset = loader.part.dataset
    has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return dataset if has_state and not loader.num_workers else None


def _twin(dataset: Any) -> Any:
    """Another dataset with copies of all that this one has, to be tried in its place; None where there can be none.

    To give a dataset back what it has told of itself would not do: some begin their next epoch there. The data itself,
    which is what is large, is shared.
    """
    if not hasattr(dataset, "load_state_dict") or hasattr(dataset, "__del__"):
        return None
    with suppress(Exception):  # one with an open file, say
        return copy.deepcopy(dataset, {id(value): value for value in _data_in(dataset)})
    return None


def _data_in(owner: Any, levels: int = 3) -> Iterator[Any]:
    """Tensors, arrays and whatever has many items, in what an object holds: but for that which has a state itself."""
    parts = owner if isinstance(owner, (dict, list, tuple)) else getattr(owner, "__dict__", {})
    for value in parts.values() if isinstance(parts, dict) else parts:
        many = isinstance(value, Sized) and len(value) > _FEW and not hasattr(value, "load_state_dict")
        if many or isinstance(value, (torch.Tensor, np.ndarray)):
            yield value
        elif levels > 1:
            yield from _data_in(value, levels - 1)


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
        """Have a dataset load its state of the end of an epoch; None if it takes no such state, and begins again."""
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
            # It has gone on from there, to find nothing. After that it begins again, or as soon as it is told to.
            if tries and self._beginning is not None:
                self._dataset.load_state_dict(self._beginning)
            batches = iterate()
        return batches
