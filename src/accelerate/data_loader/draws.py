"""What a dataset (or its collate function) itself draws at random, from the global generators.

The loader is ahead of the loop, and workers have random states of their own: those of a checkpoint are not the ones
that the next batch comes from. Where a dataset draws, the right ones are kept with the place of the loop, and a resumed
loop reads its first batch with them. Whether it draws is looked up now and then, since the states are large.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from accelerate.data_loader import streams
from accelerate.data_loader.iterable import Envelope
from accelerate.errors import warn
from accelerate.torch_internals.data_loader import before_first_read, numpy_seed, renumber

States = dict[str, Any]
T = TypeVar("T")


# --- in the process of the loop ---------------------------------------------------------------------------------


class Drawing(Protocol):
    """What is known of an iteration.

    resumed: the random states to read the first batch with. before: those that the batches ahead of the loop were read
    with, where the dataset draws from them. workers: by worker, those after its last batch that was handed out.
    turn: how many batches of the resumed epoch were dealt out to workers before.
    batches: how many of the epoch were handed out.
    indices: what decides the batches of the loader of torch that is iterated.
    """

    resumed: States
    before: States
    workers: dict[int, States]
    turn: int
    batches: int
    indices: Any


class Reader:
    """Reads the batches of one iteration, and takes no notes."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of torch's iterator."""
        return iterator

    def read(self, take: Callable[[], T]) -> T:
        """Take the batches of the next step, just before those of the last one are handed out."""
        return take()

    def all_read(self) -> None:
        """The iteration is over, and another one is about to begin, or to be saved."""


class Here(Reader):
    """The dataset is read in this process. known: which generators it is known to draw from."""

    def __init__(self, loader: Any, drawing: Drawing, known: set[str]) -> None:
        super().__init__(drawing)
        self._known = known
        self._set_by_sampler = _finds_place_while_read(loader)
        self._stateful: bool = loader.use_stateful_dataloader
        self._number = 0
        self._looks_at = 1  # 0 tells nothing, since samplers draw with it

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        states = self._drawing.resumed
        if not states or self._set_by_sampler:
            return iterator
        if not self._stateful:
            return _read_with(states, iterator)
        if not before_first_read(iterator, functools.partial(streams.set_global_states, states)):
            warn(
                "This epoch goes on with the samples that are left, but what the dataset draws at random is not what "
                "it would have drawn: a stateful loader gives no way to that in this version; use one that is not."
            )
        return iterator

    def read(self, take: Callable[[], T]) -> T:
        number = self._number
        self._number = number + 1
        if number == self._looks_at:
            self._looks_at *= 2
            before = streams.global_states()
            taken = take()
            self._known |= streams.drawn_since(before)
            self._drawing.before = {name: before[name] for name in self._known}
            return taken
        if self._known:
            self._drawing.before = streams.global_states(self._known)
        return take()


def _read_with(states: States, batches: Iterator[Any]) -> Iterator[Any]:
    streams.set_global_states(states)
    yield from batches


class _FirstIndex(Sampler[Any]):
    """Hands on what a sampler gives. When that has found its place, for which it may draw, random states are set: those
    that the dataset is read with. after: how many batches are left out before."""

    def __init__(self, sampler: Any, states: States, after: int) -> None:
        self._sampler, self._states, self._after = sampler, states, after

    def __iter__(self) -> Iterator[Any]:
        # At once, not with the first index: its order may be drawn here, before torch's loader draws a number.
        return self._handed_on(iter(self._sampler))

    def _handed_on(self, indices: Iterator[Any]) -> Iterator[Any]:
        for number, index in enumerate(indices):
            if number == self._after:
                streams.set_global_states(self._states)
            yield index


class FromWorkers(Reader):
    """Workers read the dataset, and tell their random states with a batch. indices: what torch's loader is given."""

    def __init__(self, drawing: Drawing, indices: _Indices) -> None:
        super().__init__(drawing)
        self._ahead: list[_Told] = []
        self._indices = indices
        self._iterator: Iterator[Any] | None = None

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._iterator = iterator
        return map(self._opened, iterator)

    def _opened(self, batch: Any) -> Any:
        if type(batch) is not _Told:
            return batch
        self._ahead.append(batch)
        return batch.batch

    def read(self, take: Callable[[], T]) -> T:
        for told in self._ahead:
            self._drawing.workers[told.worker] = told.states
        self._ahead.clear()
        return take()

    def all_read(self) -> None:
        if self._iterator is None:  # no iteration after all
            return
        # Workers that stay also make the batches that were asked for when the loop broke off, and draw for them.
        self._indices.stop()
        with suppress(Exception):  # one of those batches: nobody is going to see it, nor why it could not be made
            for batch in self._iterator:
                self._opened(batch)
        self.read(lambda: None)


class _Indices(Sampler[Any]):
    """Hands on what a sampler gives, until it is told to stop."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def __iter__(self) -> Iterator[Any]:
        self._stopped = False
        return self._handed_on(iter(self._sampler))  # at once, as above

    def _handed_on(self, indices: Iterator[Any]) -> Iterator[Any]:
        for index in indices:
            yield index
            if self._stopped:
                return


class Again(Reader):
    """Reads the first steps of an interrupted epoch once more, for a loop that leaves them out by itself.

    They are read with the random states that they were read with, since their order may still be drawn from them, and
    those of the loop are left alone. The states that the first step is read with are set already.
    count: how many steps come after the first one. names: of the generators that they draw from.
    before: the states that the last one was read with, if known.
    """

    def __init__(self, reader: Reader, count: int, names: Iterable[str], before: States) -> None:
        self._reader = reader
        self._left = count
        self._names = names
        self._before = before
        self._order: States | None = None
        self.over, self.all_read = reader.over, reader.all_read  # type: ignore[method-assign]

    def read(self, take: Callable[[], T]) -> T:
        if self._order is None:
            taken = self._reader.read(take)
            self._order = streams.global_states(self._names)
            return taken
        if not self._left:
            return self._reader.read(take)
        self._left -= 1
        own = streams.global_states(self._names)
        streams.set_global_states(self._order if self._left else self._order | self._before)
        try:
            return self._reader.read(take)
        finally:
            self._order = streams.global_states(self._names)
            streams.set_global_states(own)


class Samples(Sampler[Any]):
    """Hands on the batches of indices that a sampler gives, and keeps the last ones, since it is ahead of the loop."""

    _KEPT = 512

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._batches: dict[int, Any] = {}
        self.first = 0  # the number of the next iteration's first batch

    def __iter__(self) -> Iterator[Any]:
        self._batches.clear()
        return self._handed_on(iter(self._sampler), self.first)  # at once, as above

    def _handed_on(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, first):
            self._batches[number] = batch
            self._batches.pop(number - self._KEPT, None)
            yield batch

    def of_batch(self, number: int) -> list[Any] | None:
        batch = self._batches.get(number)
        return batch if batch is None or isinstance(batch, list) else [batch]


def iterate(loader: Any, drawing: Drawing) -> Iterator[Any]:
    """Have torch's loader begin an iteration; one like it, where the random states of the dataset matter."""
    read = loader.reused
    if read is None:
        read = _torch_loader(loader, drawing)
        if loader.persistent_workers:
            loader.reused = read
    drawing.indices = _indices_of(read)
    if loader.noted_samples is not None:
        loader.noted_samples.first = drawing.batches
    return iter(read)


def _torch_loader(loader: Any, drawing: Drawing) -> Any:
    base = loader.base_dataloader
    indices = _indices_of(base)
    if loader.notes_samples and not isinstance(loader.dataset, IterableDataset) and not loader.use_stateful_dataloader:
        indices = loader.noted_samples = Samples(indices)
    if _workers_tell(loader):
        worker = _Worker(base, drawing.turn, dict(drawing.workers))
        return loader.torch_loader(_Indices(indices), collate_fn=worker, worker_init_fn=worker.start)
    if drawing.resumed and _finds_place_while_read(loader):
        left_out = loader.skip_batches * loader.batches_per_step
        return loader.torch_loader(_FirstIndex(indices, drawing.resumed, left_out))
    return base if indices is _indices_of(base) else loader.torch_loader(indices)


def _indices_of(torch_loader: Any) -> Any:
    return torch_loader.sampler if torch_loader.batch_sampler is None else torch_loader.batch_sampler


def _finds_place_while_read(loader: Any) -> bool:
    """Whether it is a sampler that leaves out what was read before, just before the first batch is read here."""
    by_index = not isinstance(loader.dataset, IterableDataset)
    return by_index and not loader.num_workers and not loader.use_stateful_dataloader


def reader(loader: Any, drawing: Drawing, known: set[str]) -> Reader:
    """For the iteration that was begun last."""
    if loader.num_workers == 0:
        return Here(loader, drawing, known)
    return FromWorkers(drawing, drawing.indices) if _workers_tell(loader) else Reader(drawing)


# --- in workers -------------------------------------------------------------------------------------------------


class _Told(Envelope):
    def __init__(self, batch: Any, worker: int, states: States) -> None:
        super().__init__(batch)
        self.worker = worker
        self.states = states


class _Worker:
    """Collates batches in a worker and tells what it draws from.

    Torch deals batches out in turn, beginning with worker 0. So if the first one is not the first of the epoch, each
    worker takes the place of the one that would have had its batches, with its number, and its `states`.
    """

    def __init__(self, loader: Any, first: int, states: dict[int, States]) -> None:
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
        streams.set_global_states(self._states.get(self._place, {}))
        self._start = streams.global_states()

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        self._number += 1
        if not self._draws and self._number == self._looks_at:
            self._looks_at *= 2
            self._draws = bool(streams.drawn_since(self._start))
        if not self._draws:
            return batch
        states = streams.global_states()
        states["torch"] = states["torch"].numpy()  # travels with the others, where a tensor would take a file
        return _Told(batch, self._place, states)


def _become(info: Any, place: int) -> None:
    """Take another worker's number and, as torch does for it, its seeds."""
    base = info.seed - info.id
    renumber(info, place)
    random.seed(base + place)
    torch.manual_seed(base + place)
    np.random.seed(numpy_seed(base, place))


def _workers_tell(loader: Any) -> bool:
    """Others read again what they had read, and draw again, or (stateful ones) are not dealt batches in turn."""
    by_index = not isinstance(loader.dataset, IterableDataset)
    return loader.num_workers > 0 and by_index and not loader.use_stateful_dataloader
