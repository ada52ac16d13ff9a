"""Readers of batches, which note the random states that a dataset draws from.

A dataset (or its collate function) may itself draw from the global generators. A loader is ahead of the loop, and
workers have random states of their own: the states in a checkpoint are not the ones that the next batch is read with.
Where a dataset draws, the right ones are kept with the position of the loop, and a resumed loop reads its first batch
with them. Whether it draws is checked now and then, since the states are large.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from accelerate.data_loader.epoch import EpochLoop, RngStates
from accelerate.data_loader.iterable import Envelope
from accelerate.data_loader.rng import drawing_seed, makes_iterator
from accelerate.errors import warn
from accelerate.random import drawn_since, global_states, set_global_states
from accelerate.torch_internals.data_loader import before_first_read, numpy_seed, renumber

if TYPE_CHECKING:
    from accelerate.data_loader.base import PreparedLoader

T = TypeVar("T")

# --- in the process of the loop ---------------------------------------------------------------------------------


class Reader:
    """Reads the batches of one iteration, and takes no notes. batches: those of torch's iterator."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches

    def after_skipping(self) -> Iterator[Any]:
        """The batches for the loop, when those that are thrown away have been taken from `batches`."""
        return self.batches

    def read(self, take: Callable[[], T]) -> T:
        """Take the batches of the next step, just before those of the last one are handed out."""
        return take()

    def drain(self) -> None:
        """The iteration is over, and another one is about to begin, or to be saved."""


class InProcess(Reader):
    """The dataset is read in this process. known: which generators it is known to draw from."""

    def __init__(self, loader: PreparedLoader, loop: EpochLoop, batches: Iterator[Any], known: set[str]) -> None:
        super().__init__(batches)
        self._loop = loop
        self._known = known
        self._stateful = loader.use_stateful_dataloader
        # A sampler leaves out what was read before just before the first batch is read, and then sets them.
        self._set_by_sampler = not loop.part.is_iterable and not self._stateful
        self._number = 0
        self._looks_at = 1  # 0 tells nothing, since samplers draw with it

    def after_skipping(self) -> Iterator[Any]:
        states = self._loop.first_rng
        if not states or self._set_by_sampler:
            return self.batches
        if not self._stateful:
            return _read_with(states, self.batches)
        if not before_first_read(self.batches, functools.partial(set_global_states, states)):
            warn(
                "This epoch continues with the remaining samples, but the random numbers that its dataset draws differ "
                "from those of an uninterrupted run, because this version of torchdata cannot restore them: use a "
                "loader that is not stateful."
            )
        return self.batches

    def read(self, take: Callable[[], T]) -> T:
        number = self._number
        self._number = number + 1
        if number == self._looks_at:
            self._looks_at *= 2
            before = global_states()
            taken = take()
            self._known |= drawn_since(before)
            self._loop.before = {name: before[name] for name in self._known}
            return taken
        if self._known:
            self._loop.before = global_states(self._known)
        return take()


def _read_with(states: RngStates, batches: Iterator[Any]) -> Iterator[Any]:
    set_global_states(states)
    yield from batches


class TrackedSampler(Sampler[Any]):
    """What a sampler gives, on its way to torch's loader, which is ahead of the loop.

    `notes`: keep the last batches of indices, for `of_batch`. `first_rng`: random states to set when the sampler, which
    may draw to find it, has come to its place behind `left_out` batches: those that the dataset is read with.
    `epoch_rng`: those that were in their place, with which the first samples of the epoch were read.
    `stop` ends the iteration that goes on.
    """

    _NOTED = 512

    def __init__(self, sampler: Any, notes: bool, first_rng: RngStates | None = None, left_out: int = 0) -> None:
        self._sampler = sampler
        self._notes = notes
        self._first_rng = first_rng
        self._left_out = left_out
        self._batches: dict[int, Any] = {}
        self._stopped = False
        self.epoch_rng: RngStates = {}
        self.first = 0  # the number of the next iteration's first batch

    def __iter__(self) -> Iterator[Any]:
        self._batches.clear()
        self._stopped = False
        # At once, not with the first index: its order may be drawn here, before torch's loader draws a number.
        return self._handed_on(iter(self._sampler), self.first)

    def _handed_on(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if self._first_rng is not None and number == self._left_out:
                self.epoch_rng = global_states(self._first_rng)
                set_global_states(self._first_rng)
            if self._notes:
                self._batches[first + number] = batch
                self._batches.pop(first + number - self._NOTED, None)
            yield batch
            if self._stopped:
                return

    def stop(self) -> None:
        self._stopped = True

    def of_batch(self, number: int) -> list[Any] | None:
        """The indices of a batch, if they were noted."""
        batch = self._batches.get(number)
        return batch if batch is None or isinstance(batch, list) else [batch]


class Workers(Reader):
    """Workers read the dataset, and tell their random states with a batch. indices: what torch's loader is given."""

    def __init__(self, loop: EpochLoop, batches: Iterator[Any], indices: TrackedSampler) -> None:
        super().__init__(batches)
        self._loop = loop
        self._indices = indices
        self._ahead: list[BatchWithRng] = []

    def after_skipping(self) -> Iterator[Any]:
        return map(self._opened, self.batches)

    def _opened(self, batch: Any) -> Any:
        if type(batch) is not BatchWithRng:
            return batch
        self._ahead.append(batch)
        return batch.batch

    def read(self, take: Callable[[], T]) -> T:
        for batch in self._ahead:
            self._loop.workers[batch.worker] = batch.states
        self._ahead.clear()
        return take()

    def drain(self) -> None:
        # Workers that stay also make the batches that were asked for when the loop broke off, and draw for them.
        self._indices.stop()
        with suppress(Exception):  # one of those batches: nobody is going to see it, nor why it could not be made
            for batch in self.batches:
                self._opened(batch)
        self.read(lambda: None)


class Replay(Reader):
    """Reads the first steps of an interrupted epoch once more, for a loop that leaves them out by itself.

    They are read with the random states that they were read with, since their order may still be drawn from them, and
    those of the loop are left alone. The states that the first step is read with are set already.
    count: how many steps come after the first one. names: of the generators that they draw from.
    before: the states that the last one was read with, if known.
    """

    def __init__(self, reader: Reader, count: int, names: Iterable[str], before: RngStates) -> None:
        super().__init__(reader.batches)
        self._reader = reader
        self._left = count
        self._names = names
        self._before = before
        self._order: RngStates | None = None

    def after_skipping(self) -> Iterator[Any]:
        return self._reader.after_skipping()

    def read(self, take: Callable[[], T]) -> T:
        if self._order is None:
            taken = self._reader.read(take)
            self._order = global_states(self._names)
            return taken
        if not self._left:
            return self._reader.read(take)
        self._left -= 1
        own = global_states(self._names)
        set_global_states(self._order if self._left else self._order | self._before)
        try:
            return self._reader.read(take)
        finally:
            self._order = global_states(self._names)
            set_global_states(own)


def open_reader(loader: PreparedLoader, loop: EpochLoop, known: set[str], *, draws_base_seed: bool) -> Reader:
    """Have torch's loader begin an iteration; one like it, where the random states of the dataset matter.

    known: which generators the dataset is known to draw from.
    draws_base_seed: whether torch's loader draws a number (the seed of its workers) to begin.
    """
    part = loop.part
    makes = makes_iterator(loader, part)
    with drawing_seed(part.torch_loader, makes, draws_base_seed):
        torch_loader = _torch_loader(loader, loop) if makes else loader.reused
        if loader.persistent_workers and part is loader.part:
            loader.reused = torch_loader
        if loader.tracked_sampler is not None:
            loader.tracked_sampler.first = loop.batches
        batches = iter(torch_loader)
    if loader.num_workers == 0:
        return InProcess(loader, loop, batches, known)
    # Without a sampler, workers read again what they had read, and draw again, or (stateful ones) are not dealt batches
    # in turn.
    return Reader(batches) if loader.tracked_sampler is None else Workers(loop, batches, loader.tracked_sampler)


def _torch_loader(loader: PreparedLoader, loop: EpochLoop) -> Any:
    part, notes, first_rng = loop.part, loader.notes_samples, loop.first_rng
    loader.tracked_sampler = None
    if part.is_iterable or loader.use_stateful_dataloader:
        return part.torch_loader
    if loader.num_workers:
        worker = _Worker(part.torch_loader, loop.turn, dict(loop.workers))
        loader.tracked_sampler = TrackedSampler(part.indices, notes)
        return part.again(loader.tracked_sampler, collate_fn=worker, worker_init_fn=worker.start).torch_loader
    if not notes and not first_rng:
        return part.torch_loader
    loader.tracked_sampler = TrackedSampler(part.indices, notes, first_rng, part.skip_batches * loader.batches_per_step)
    return part.again(loader.tracked_sampler).torch_loader


# --- in workers -------------------------------------------------------------------------------------------------


class BatchWithRng(Envelope):
    def __init__(self, batch: Any, worker: int, states: RngStates) -> None:
        super().__init__(batch)
        self.worker = worker
        self.states = states


class _Worker:
    """Collates batches in a worker and tells what it draws from.

    Torch deals batches out in turn, beginning with worker 0. So if the first one is not the first of the epoch, each
    worker takes the place of the one that would have had its batches, with its number, and its `states`.
    """

    def __init__(self, loader: Any, first: int, states: dict[int, RngStates]) -> None:
        self._collate = loader.collate_fn
        self._init = loader.worker_init_fn
        self._first = first
        self._states = states
        self._number = 0
        self._looks_at = 1

    def start(self, number: int) -> None:
        info: Any = get_worker_info()
        self._place = (number + self._first) % info.num_workers
        if self._place != number:
            _become(info, self._place)
        if self._init is not None:
            self._init(self._place)
        self._draws = self._place in self._states
        set_global_states(self._states.get(self._place, {}))
        self._start = global_states()

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        self._number += 1
        if not self._draws and self._number == self._looks_at:
            self._looks_at *= 2
            self._draws = bool(drawn_since(self._start))
        if not self._draws:
            return batch
        states = global_states()
        states["torch"] = states["torch"].numpy()  # travels with the others, where a tensor would take a file
        return BatchWithRng(batch, self._place, states)


def _become(info: Any, place: int) -> None:
    """Take another worker's number and, as torch does for it, its seeds."""
    base = info.seed - info.id
    renumber(info, place)
    random.seed(base + place)
    torch.manual_seed(base + place)
    np.random.seed(numpy_seed(base, place))
