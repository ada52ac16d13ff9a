"""Where a loop stands in an epoch, and how to bring another run to the same place."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler

from accelerate.data_loader.iterable import IterableDatasetShard
from accelerate.data_loader.rest import SkipSampler
from accelerate.data_loader.samplers import RANDOM_SAMPLERS, SeedableRandomSampler, sampler_owner


class Position:
    """The place of the loop in a loader's data, shared by the loader and the loaders for the rest of its epochs.

    batches: how many of the epoch were handed out, after `samples` that were read in batches of another size.
    running: whether an epoch is being read. start: the random states that the order of the epoch came from.
    follows_dataset: whether to keep the state of a dataset that can tell its place, after each batch.
    """

    follows_dataset = False

    def __init__(self) -> None:
        self.dataset: Any = None
        self.batches = self.samples = 0
        self.running = False
        self.finished = False
        self.start: dict[str, Any] | None = None
        # What a loaded checkpoint says, until the next iteration has followed it.
        self._replay: dict[str, Any] | None = None
        self._skip: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None

    # --- during an epoch ----------------------------------------------------------------------------------------

    def begin(self, loader: Any) -> None:
        self.start = _random_states(loader)
        self.batches, self.samples = loader._left_out_batches, loader._left_out_samples
        self.running, self.finished = True, False
        self.dataset = None

    def fetched(self, loader: Any) -> None:
        """The batch at hand was fetched, and the next one is about to be."""
        if self.follows_dataset and (dataset := _telling_dataset(loader)) is not None:
            self.dataset = copy.deepcopy(dataset.state_dict())

    def handed_out(self, last: bool) -> None:
        self.batches += 1
        self.finished = last

    def end(self) -> None:
        self.running = False

    # --- saving and loading -------------------------------------------------------------------------------------

    def state_dict(self, loader: Any) -> dict[str, Any]:
        """Where the loop stands. inside: whether this process has batches left of the epoch, or else it is over."""
        sampler = _sampler(loader)
        return {
            "epoch": loader.iteration,
            "running": self.running,
            "inside": self.running and not self.finished,
            "batches": self.batches,
            "samples": self.samples,
            "start": self.start,
            "dataset": self.dataset,
            "generators": [generator.get_state() for generator in _generators(loader)],
            "seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "batch": loader.total_batch_size,
            "processes": loader._shares,
        }

    def load_state_dict(self, state: dict[str, Any], loader: Any, *, skip: bool) -> None:
        """Have the next iteration follow the interrupted one; skip: and start where that one was."""
        vars(self).update(vars(Position()))
        state = _settled(state)
        loader.iteration = state["epoch"]
        sampler = _sampler(loader)
        if isinstance(sampler, SeedableRandomSampler) and state["seed"] is not None:
            sampler.initial_seed = state["seed"]
        start = state["start"]
        if state["generators"] and not _generators(loader) and isinstance(sampler, RANDOM_SAMPLERS):
            sampler.generator = torch.Generator()  # several processes shuffled by one; a single one has none
        elif start is not None and not state["generators"] and isinstance(sampler, RANDOM_SAMPLERS):
            start = {**start, "generators": [_generator_of_one(start, sampler)]}
        for generator, value in zip(_generators(loader), state["generators"], strict=False):
            generator.set_state(value)
        self._replay = start
        self._skip = state if skip and (state["batches"] or state["samples"]) else None

    # --- the iteration after loading ----------------------------------------------------------------------------

    def rest_of(self, loader: Any) -> Any:
        """A loader for what is left of the interrupted epoch, once; None when there is nothing to leave out."""
        if self._skip is None:
            return None
        state, self._skip = self._skip, None
        samples, batches = state["samples"], state["batches"]
        dataset = _telling_dataset(loader)
        if dataset is not None and state["dataset"] is not None:
            dataset.load_state_dict(state["dataset"])
            return loader.going_on(samples + batches * state["batch"])
        if not _same_batches(state, loader):
            samples, batches = samples + batches * state["batch"], 0
        rest = loader.without_samples(samples) if samples else loader
        return rest.without_first(batches) if batches else rest

    def asked_to_skip(self, count: int) -> bool:
        """A script skips by itself what would be skipped anyway: whether it means just that."""
        same = self._skip is not None and self._skip["batches"] == count
        if not same:
            self._skip = None
        return same

    def rewind(self, loader: Any) -> None:
        """Put the random states back to where the interrupted epoch began, until its first batch is there."""
        if self._replay is None:
            return
        states, self._replay = self._replay, None
        self._now = _global_states()
        for generator, value in zip(_generators(loader), states["generators"], strict=False):
            generator.set_state(value)
        _set_global_states(states)

    def caught_up(self) -> None:
        """The first batch is there: random states are again those that the checkpoint has brought."""
        if self._now is not None:
            states, self._now = self._now, None
            _set_global_states(states)


def _settled(state: dict[str, Any]) -> dict[str, Any]:
    """A saved place, of which nothing but the next epoch is left when the one it was in is over."""
    if state["inside"]:
        return state
    nothing = {"batches": 0, "samples": 0, "start": None, "dataset": None}
    return {**state, **nothing, "epoch": state["epoch"] + state["running"]}


def _telling_dataset(loader: Any) -> Any:
    """The iterable dataset of a loader, where this process reads it and it can tell its place and go there."""
    dataset = loader.dataset
    if loader.num_workers or loader.use_stateful_dataloader or not isinstance(dataset, IterableDataset):
        return None
    dataset = getattr(dataset, "dataset", dataset) if isinstance(dataset, IterableDatasetShard) else dataset
    return dataset if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") else None


def _same_batches(state: dict[str, Any], loader: Any) -> bool:
    return bool(state["batch"] == loader.total_batch_size and state["processes"] == loader._shares)


def change(state: dict[str, Any], loader: Any) -> str | None:
    """What is different from when `state` was saved, in the middle of a sentence; None if nothing is."""
    if _same_batches(state, loader):
        return None
    state = _settled(state)
    old, new = state["batch"], loader.total_batch_size
    text = f"{state['processes']} processes and {old} samples a step became {loader._shares} and {new}"
    length = loader._known_length()
    if length is not None:
        left = max(length - state["samples"] - state["batches"] * old, 0)
        text += f", so {-(-left // new)} steps are left of epoch {state['epoch']} instead of {-(-left // old)}"
    return text + _inexact(state, loader)


def _inexact(state: dict[str, Any], loader: Any) -> str:
    """A word of warning where some of the remaining samples may come twice or not at all."""
    if isinstance(loader.dataset, IterableDataset):
        if not loader.num_workers or loader.use_stateful_dataloader:
            return ""
        return " (worker processes read its dataset: the last samples before the checkpoint may come a second time)"
    owner = sampler_owner(loader)
    if owner is None or type(owner) is BatchSampler:
        sampler = _sampler(loader)
        if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is DistributedSampler.__iter__:
            return ""
        return f" (only its {type(sampler).__name__} knows which samples were seen: some may come twice or not at all)"
    if state["batch"] * loader._shares == loader.total_batch_size * state["processes"]:
        return ""  # the same batches, given to more or fewer processes
    return f" (its {type(owner).__name__} now makes other batches: some samples may come twice or not at all)"


def _generator_of_one(start: dict[str, Any], sampler: Any) -> torch.Tensor:
    """The state of a generator that shuffles as a single process, which has none, did from the global state."""
    generator = torch.Generator()
    generator.set_state(start["torch"])
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # torch's loader takes one for its workers
    if isinstance(sampler, RandomSampler):
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()))
    return generator.get_state()


def _sampler(loader: Any) -> Any:
    owner = sampler_owner(loader)
    sampler = getattr(loader, "sampler", None) if owner is None else getattr(owner, "sampler", None)
    return sampler.sampler if isinstance(sampler, SkipSampler) else sampler


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that may decide the order of a loader, each once."""
    found: list[torch.Generator] = []
    iterable = isinstance(loader.dataset, IterableDataset)
    holders = [loader.dataset] if iterable else [_sampler(loader), sampler_owner(loader)]
    values = [getattr(loader, "synchronized_generator", None), loader.base_dataloader.generator]
    for holder in holders:
        values += [value for _, value in sorted(getattr(holder, "__dict__", {}).items(), key=lambda item: item[0])]
    for value in values:
        if isinstance(value, torch.Generator) and not any(value is other for other in found):
            found.append(value)
    return found


def _global_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _set_global_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


def _random_states(loader: Any) -> dict[str, Any]:
    return {**_global_states(), "generators": [generator.get_state() for generator in _generators(loader)]}
