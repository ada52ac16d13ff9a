"""Where a loop stands in an epoch, and how to bring another run to the same place."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from accelerate.data_loader import draws, streams
from accelerate.data_loader.indexed import IndexedRandomSampler
from accelerate.data_loader.iterable import IterableDatasetShard
from accelerate.data_loader.rest import SkipSampler
from accelerate.data_loader.samplers import (
    RANDOM_SAMPLERS,
    SamplerShard,
    SeedableRandomSampler,
    cuts_in_order,
    sampler_owner,
)
from accelerate.state import ending


@dataclass(eq=False)
class Place:
    """The place of one iteration.

    start: the random states that the order of the epoch came from.
    batches: how many of the epoch were handed out, after `samples` that were read in batches of another size.
    earlier: in how many steps those samples were. partial: whether its first batch is not the first one of the epoch.
    dataset: the state of a dataset that can tell its place. resumed, before, workers, turn, indices: as in
    `draws.Drawing`.
    """

    epoch: int
    start: dict[str, Any]
    batches: int
    samples: int
    earlier: int
    partial: bool
    finished: bool = False
    dataset: Any = None
    resumed: draws.States = field(default_factory=dict)
    before: draws.States = field(default_factory=dict)
    workers: dict[int, draws.States] = field(default_factory=dict)
    turn: int = 0
    workers_stay: bool = False  # for the next epoch
    indices: Any = None

    def handed_out(self, last: bool) -> None:
        self.batches += 1
        self.finished = last


class Position:
    """The places of the loops over a loader, shared by it and the loaders for the rest of its epochs.

    follows_dataset: whether to keep the state of a dataset that can tell its place, after each batch.
    trains: whether the last loop called `backward` for its batches.
    """

    follows_dataset = False
    trains = False

    def __init__(self) -> None:
        # Those that are being read: the last one counts, the others are the loops around it.
        self._places: list[Place] = []
        # The last one, if it was broken off, until the next one begins.
        self._broken: Place | None = None
        # What a loaded checkpoint says, until the next iteration has begun to follow it.
        self._loaded: dict[str, Any] | None = None
        self._replay: dict[str, Any] | None = None
        self._skip: dict[str, Any] | None = None
        # The same, of a stateful loader that goes there by itself.
        self._ahead: dict[str, Any] | None = None
        # Whether the dataset was told to be where it was after the last sample of an epoch; what it said before that.
        self._at_an_end = False
        self._beginning: Any = None
        # While the first batch is fetched: the random states to go on with.
        self._now: dict[str, Any] | None = None
        self._same = False
        # How many steps of the interrupted epoch were done, in such batches as there are now.
        self._done = 0
        # Whether torch's loader draws a number at the next iteration, where that is to be as in the saved run.
        self._draws: bool | None = None
        self._draws_next: bool | None = None
        # Which generators the dataset draws from, in this process, and the states of workers that stay.
        self._drawn_from: set[str] = set()
        self._workers: dict[int, draws.States] = {}
        self._reader: draws.Reader | None = None  # of these
        # What the dataset drew from when the loaded checkpoint was saved.
        self._drawn: dict[str, Any] | None = None

    # --- during an epoch ----------------------------------------------------------------------------------------

    def begin(self, loader: Any) -> Place:
        seed, self._draws = self._draws, None
        if loader._continued is None:
            seed, self._draws_next = (self._draws_next if seed is None else seed), None
        start = streams.random_states(loader) | {"draws": streams.makes_iterator(loader) if seed is None else seed}
        # Where a script skips without a checkpoint, the rest of an epoch has workers of its own.
        stay = loader.persistent_workers and (loader._continued is None or loader._goes_on_with is not None)
        start["workers"] = self._states_of_workers() if stay else {}
        batches, samples, steps = loader._left_out_batches, loader._left_out_samples, loader._left_out_steps
        place = Place(loader.iteration, start, batches, samples, steps - batches, bool(steps), workers_stay=stay)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and loader._continued is None:
            place.batches, place.samples = ahead["batches"], ahead["samples"]
            place.earlier, place.partial = ahead["steps"] - ahead["batches"], ahead["partial"]
            loader._goes_on_with = self._drawn
        drawn, loader._goes_on_with = loader._goes_on_with, None
        place.workers = dict(start["workers"])
        if drawn is not None:
            place.resumed, place.workers = drawn["before"], dict(drawn["workers"])
            place.turn = batches * loader.batches_per_step
        self._places.append(place)
        self._loaded = self._broken = None
        return place

    def iterate(self, loader: Any, place: Place) -> Iterator[Any]:
        """Have torch's loader begin the iteration; returns its iterator."""
        if loader.num_workers and streams.makes_iterator(loader):
            ending.let_threads_finish(naps=5)  # workers are forked
        with streams.drawing_seed(loader, place.start["draws"]):
            batches = draws.iterate(loader, place)
        if not self._at_an_end:
            return batches
        self._at_an_end = False
        for tries in range(2):
            for first in batches:
                return itertools.chain([first], batches)
            # It has gone on from there, to find nothing. After that it begins anew, or as soon as it is told to.
            if tries and self._beginning is not None:
                self._ended_dataset(loader).load_state_dict(self._beginning)
            with streams.drawing_seed(loader, False):
                batches = draws.iterate(loader, place)
        return batches

    def reader(self, loader: Any, place: Place) -> draws.Reader:
        reader = draws.reader(loader, place, self._drawn_from)
        if place.workers_stay:
            self._reader = reader
        again = self._done - loader._left_out_steps
        before = {} if self._drawn is None else self._drawn["before"]
        # Beside workers only a sampler draws in this process, and it is not known from what.
        names = streams.NAMES if loader.num_workers else tuple(before)
        if self._now is None or again <= 0 or not names or loader.use_stateful_dataloader:
            return reader
        return draws.Again(reader, again, names, before)

    def fetched(self, loader: Any, place: Place) -> None:
        """The batch at hand was fetched, and the next one is about to be."""
        if self.follows_dataset and (dataset := _telling_dataset(loader)) is not None:
            place.dataset = copy.deepcopy(dataset.state_dict())

    def at_hand(self) -> Place | None:
        """The place of the loop that has the batch at hand."""
        return self._places[-1] if self._places else None

    def end(self, place: Place) -> bool:
        """An iteration is over; whether it still was one of this run, and no checkpoint has been loaded meanwhile."""
        if place not in self._places:
            return False
        self._places.remove(place)
        self._broken = None if place.finished else place
        if place.workers_stay:
            self._workers = place.workers
        return True

    def _states_of_workers(self) -> dict[int, draws.States]:
        """Those of workers that stay, between two iterations."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.all_read()
        return self._workers

    # --- saving and loading -------------------------------------------------------------------------------------

    def state_dict(self, loader: Any) -> dict[str, Any]:
        """Where the loop stands.

        running: whether an epoch is being read. inside: whether this process has batches left of it, or else it is
        over. steps: of the epoch so far, whatever their batches were. after: the state of the dataset when it is over.
        broken: the same of an epoch that was broken off, when none is being read.
        """
        generators = streams.generator_states(loader)
        if self._loaded is not None:  # nothing was read since
            alike = len(generators) == len(self._loaded["generators"])
            return self._loaded | ({"generators": generators} if alike else {})
        sampler = _sampler(loader)
        if self._places:
            place, broken = self._places[-1], None
        else:
            workers = self._states_of_workers()
            place, broken = Place(loader.iteration, {}, 0, 0, 0, False, finished=True, workers=workers), self._broken
        # An iterable dataset that was left in its middle would go on from there, where the next epoch begins anew.
        left = broken is not None and isinstance(loader.dataset, IterableDataset)
        ended = self._ended_dataset(loader) if place.finished and not left else None
        return {
            **_told(place),
            "running": bool(self._places),
            "broken": None if broken is None else _told(broken) | {"running": True},
            "after": _state_of(ended),
            "draws_next": streams.makes_iterator(loader) if self._draws_next is None else self._draws_next,
            "generators": generators,
            "seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "batch": loader.total_batch_size,
            "processes": loader._shares,
            "workers": loader.num_workers,
            "order": order_of(loader),
        }

    def load_state_dict(self, state: dict[str, Any], loader: Any, *, skip: bool) -> None:
        """Have the next iteration follow the interrupted one; skip: and start where that one was."""
        vars(self).update(vars(Position()))
        if loader.persistent_workers:
            loader.forget_workers()  # new ones start with the states that are loaded
        if other_order(state, loader) is not None:
            loader.iteration = state["epoch"]  # which begins anew: its middle is no place in this order
            return
        if not state["inside"]:
            loader.forget_state()  # a stateful loader would go on with an epoch that is over
        self._loaded = state
        self._draws_next = state["draws_next"]
        self._follow(_settled(state), loader, skip)
        ended = None if state["inside"] or state.get("after") is None else self._ended_dataset(loader)
        if ended is not None:
            self._beginning = _state_of(ended)
            with suppress(Exception):  # one that takes no such place begins anew
                ended.load_state_dict(copy.deepcopy(state["after"]))
                self._at_an_end = isinstance(loader.dataset, IterableDataset)

    def _ended_dataset(self, loader: Any) -> Any:
        """The dataset that has a state from one epoch to the next, and is read here."""
        if loader.use_stateful_dataloader:
            return _stateful_dataset(loader)
        return _telling_dataset(loader) if self.follows_dataset else None

    def _follow(self, state: dict[str, Any], loader: Any, skip: bool) -> None:
        self._at_an_end = False
        loader.iteration = state["epoch"]
        sampler = _sampler(loader)
        if isinstance(sampler, SeedableRandomSampler) and state["seed"] is not None:
            sampler.initial_seed = state["seed"]
        start = state["start"]
        if state["generators"] and not streams.generators(loader) and isinstance(sampler, RANDOM_SAMPLERS):
            sampler.generator = torch.Generator()  # several processes shuffled by one; a single one has none
        elif start is not None and not state["generators"] and isinstance(sampler, RANDOM_SAMPLERS):
            batches = sampler_owner(loader)
            at_once = batches is not None and streams.makes_all_at_once(loader, batches)
            start = {**start, "generators": [streams.state_of_one(start, sampler, at_once)]}
        streams.set_generators(loader, state["generators"])
        self._replay = start
        self._same = _same_batches(state, loader)
        self._done = state["steps"] if self._same else 0
        self._skip = state if skip and state["steps"] else None
        self._ahead = state if loader.use_stateful_dataloader and not skip else None
        if self._same and state["workers"] == loader.num_workers and "drawn" in state:
            self._drawn = state["drawn"]
            self._drawn_from = set(self._drawn["before"])
            self._workers = self._drawn["workers"] if start is None else start["workers"]

    # --- the iteration after loading ----------------------------------------------------------------------------

    def rest_of(self, loader: Any) -> Any:
        """A loader for what is left of the interrupted epoch, once; None when there is nothing to leave out."""
        if self._skip is None:
            return None
        state, self._skip = self._skip, None
        rest = _rest(state, loader)
        rest._left_out_steps = state["steps"]
        rest._goes_on_with = self._drawn
        return rest

    def asked_to_skip(self, count: int, loader: Any) -> bool:
        """A script skips by itself what would be skipped anyway: whether it means just that."""
        ended = self._ended()
        if ended is not None and count and count == ended["steps"]:
            self._follow(ended, loader, skip=True)
            return True
        same = self._skip is not None and count in (self._skip["steps"], self._skip["batches"])
        if not same:
            self._skip = None
        return same

    def _ended(self) -> dict[str, Any] | None:
        """The epoch that was over, or had been left by a `break`, when the loaded checkpoint was saved."""
        saved = self._loaded
        if saved is None:
            return None
        if saved["running"]:
            return None if saved["inside"] else saved
        broken = saved.get("broken")  # not in folders of before there was one
        return None if broken is None else saved | broken

    def drawn_after(self, count: int) -> dict[str, Any] | None:
        """What the dataset drew from, if it is known, when `count` batches of the interrupted epoch were done."""
        saved = self._loaded
        return self._drawn if saved is not None and saved["inside"] and saved["steps"] == count else None

    def rewind(self, loader: Any) -> None:
        """Put the random states back to where the interrupted epoch began, until its first batch is there."""
        if self._replay is None:
            return
        states, self._replay = self._replay, None
        self._now = streams.random_states(loader)
        self._draws = states["draws"]
        streams.set_generators(loader, states["generators"])
        streams.set_global_states(states)

    def caught_up(self, loader: Any) -> None:
        """The first batch is there: random states are again those that the checkpoint has brought."""
        if self._now is None:
            return
        states, self._now = self._now, None
        streams.set_global_states(states)
        # A generator may be shared with another loader. It stays where it is if the order is still being drawn, and not
        # from the place where it was when the checkpoint was saved.
        if streams.draws_at_once(_sampler(loader)) or (self._same and loader._left_out_steps):
            streams.set_generators(loader, states["generators"])


# Samplers that give different orders, of which no other one can follow the middle.
_ORDERS = (SequentialSampler, RandomSampler, SeedableRandomSampler, IndexedRandomSampler)


def order_of(loader: Any) -> str | None:
    """Which kind of sampler makes the order of a loader, where that is one of those that `prepare` knows."""
    kind = type(_sampler(loader))
    return kind.__name__ if kind in _ORDERS else None


def other_order(state: dict[str, Any], loader: Any) -> tuple[str, str] | None:
    """The orders of a saved place in the middle of an epoch and of a loader, where they are known and differ."""
    saved, now = state.get("order"), order_of(loader)  # not in folders of before it was written down
    return None if not state["inside"] or saved is None or now is None or saved == now else (saved, now)


def takes_over(state: dict[str, Any], loader: Any) -> bool:
    """Whether it is not a stateful loader itself that can go on from where it was."""
    alike = _same_batches(state, loader) and state["workers"] == loader.num_workers
    return state["partial"] or not alike or _minds_iterating_twice(loader)


def _minds_iterating_twice(loader: Any) -> bool:
    """torchdata has a sampler iterate twice when it goes on from a state: one that shuffles at once gives out the
    second order."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    with suppress(Exception):  # one that cannot be iterated yet, before it is told the epoch, say
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return streams.makes_all_at_once(loader, batches)
    return False


def _state_of(dataset: Any) -> Any:
    with suppress(Exception):  # one that cannot tell now, before it was read or where another process reads it
        return None if dataset is None else copy.deepcopy(dataset.state_dict())
    return None


def _told(place: Place) -> dict[str, Any]:
    return {
        "epoch": place.epoch,
        "inside": not place.finished,
        "batches": place.batches,
        "samples": place.samples,
        "steps": place.earlier + place.batches,
        "partial": place.partial,
        "start": place.start or None,
        "dataset": place.dataset,
        "drawn": {"before": place.before, "workers": dict(place.workers)},
    }


def _settled(state: dict[str, Any]) -> dict[str, Any]:
    """A saved place, of which nothing but the next epoch is left when the one it was in is over."""
    if state["inside"]:
        return state
    nothing = {"batches": 0, "samples": 0, "steps": 0, "start": None, "dataset": None}
    drawn = {"drawn": state["drawn"] | {"before": {}}} if "drawn" in state else {}
    return {**state, **nothing, **drawn, "epoch": state["epoch"] + state["running"]}


def _rest(state: dict[str, Any], loader: Any) -> Any:
    """A loader for what comes after a saved place."""
    samples, batches = state["samples"], state["batches"]
    dataset = _telling_dataset(loader)
    if dataset is not None and state["dataset"] is not None:
        dataset.load_state_dict(state["dataset"])
        return loader.going_on(samples + batches * state["batch"])
    if not _same_batches(state, loader):
        samples, batches = samples + batches * state["batch"], 0
    rest = loader.without_samples(samples) if samples else loader
    return rest.after(batches) if batches else rest


def _telling_dataset(loader: Any) -> Any:
    """The iterable dataset of a loader, where this process reads it and it can tell its place and go there."""
    if loader.use_stateful_dataloader or not isinstance(loader.dataset, IterableDataset):
        return None
    return _stateful_dataset(loader)


def _stateful_dataset(loader: Any) -> Any:
    """The dataset of a loader, where this process reads it and it has a state."""
    dataset = loader.dataset
    dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
    has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return dataset if has_state and not loader.num_workers else None


def _same_batches(state: dict[str, Any], loader: Any) -> bool:
    return bool(state["batch"] == loader.total_batch_size and state["processes"] == loader._shares)


def change(state: dict[str, Any], loader: Any) -> str | None:
    """What is different from when `state` was saved, in the middle of a sentence; None if nothing is."""
    if _same_batches(state, loader):
        return None
    state = _settled(state)
    old, new = state["batch"], loader.total_batch_size
    text = f"{state['processes']} processes and {old} samples a step became {loader._shares} and {new}"
    length = _length(loader)
    if length is not None:
        left = max(length - state["samples"] - state["batches"] * old, 0)
        drop_last = getattr(sampler_owner(loader), "drop_last", loader._drop_last)
        steps, before = (left // size if drop_last else -(-left // size) for size in (new, old))
        then = "as before" if steps == before else f"instead of {before}"
        text += f", so {steps} steps are left of epoch {state['epoch']} {then}"
    return text + _inexact(state, loader)


def _length(loader: Any) -> int | None:
    """How many samples an epoch has, on all processes together: a sampler may give more or fewer than there are."""
    sampler, owner = _sampler(loader), sampler_owner(loader)
    kept = isinstance(sampler, DistributedSampler) and sampler.num_replicas == loader._shares
    if isinstance(loader.dataset, IterableDataset) or kept:
        length: int | None = loader._known_length()
        return length
    with suppress(TypeError, NotImplementedError, AttributeError):  # an endless one, or batches of no certain size
        return len(sampler) if owner is None or cuts_in_order(owner) else len(owner) * int(owner.batch_size)
    return None


def _inexact(state: dict[str, Any], loader: Any) -> str:
    """A word of warning where some of the remaining samples may come twice or not at all."""
    if isinstance(loader.dataset, IterableDataset):
        if not loader.num_workers:
            return ""
        return " (worker processes read its dataset: the last samples before the checkpoint may come a second time)"
    owner = sampler_owner(loader)
    if owner is None or cuts_in_order(owner):
        sampler = _sampler(loader)
        if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is DistributedSampler.__iter__:
            return ""
        return f" (only its {type(sampler).__name__} knows which samples were seen: some may come twice or not at all)"
    if state["batch"] * loader._shares == loader.total_batch_size * state["processes"]:
        return ""  # the same batches, given to more or fewer processes
    return f" (its {type(owner).__name__} now makes other batches: some samples may come twice or not at all)"


def _sampler(loader: Any) -> Any:
    owner = sampler_owner(loader)
    sampler = getattr(loader, "sampler", None) if owner is None else getattr(owner, "sampler", None)
    while isinstance(sampler, (SkipSampler, SamplerShard)):
        sampler = sampler.sampler
    return sampler
