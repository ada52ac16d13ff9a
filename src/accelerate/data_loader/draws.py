"""What a dataset (or its collate function) itself draws at random, from the global generators.

The loader is ahead of the loop, and workers have random states of their own: those of a checkpoint are not the ones
that the next batch comes from. Where a dataset draws, the right ones are kept with the place of the loop, and a resumed
loop reads its first batch with them. Whether it draws is looked up now and then, since the states are large.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelerate.data_loader import streams
from accelerate.data_loader.iterable import Envelope

States = dict[str, Any]
T = TypeVar("T")


# --- in the process of the loop ---------------------------------------------------------------------------------


class Drawing(Protocol):
    """What is known of an iteration.

    resumed: the random states to read the first batch with. before: those that the batches ahead of the loop were read
    with, where the dataset draws from them. workers: by worker, those after its last batch that was handed out.
    turn: how many batches of the resumed epoch were dealt out to workers before.
    """

    resumed: States
    before: States
    workers: dict[int, States]
    turn: int


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

    def __init__(self, drawing: Drawing, known: set[str]) -> None:
        super().__init__(drawing)
        self._known = known
        self._number = 0
        self._looks_at = 1  # 0 tells nothing, since samplers draw with it

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        if self._drawing.resumed:
            _FirstFetch(iterator, self._drawing.resumed)
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


class _FirstFetch:
    """Stands in for the fetcher of torch's iterator, once: between the sampler, which has to find its place with other
    random states, and the dataset."""

    def __init__(self, iterator: Any, states: States) -> None:
        self._iterator, self._states = iterator, states
        self._fetcher = iterator._dataset_fetcher
        iterator._dataset_fetcher = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, index: Any) -> Any:
        self._iterator._dataset_fetcher = self._fetcher
        streams.set_global_states(self._states)
        return self._fetcher.fetch(index)


class FromWorkers(Reader):
    """Workers read the dataset, and tell their random states with a batch."""

    def __init__(self, drawing: Drawing) -> None:
        super().__init__(drawing)
        self._ahead: list[_Told] = []
        self._iterator: Any = None

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
        self._iterator._sampler_iter = iter(())
        with suppress(Exception):  # one of those batches: nobody is going to see it, nor why it could not be made
            for batch in self._iterator:
                self._opened(batch)
        self.read(lambda: None)


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


def reader(loader: Any, drawing: Drawing, known: set[str]) -> Reader:
    if loader.num_workers == 0:
        return Here(drawing, known)
    return (FromWorkers if _workers_tell(loader) else Reader)(drawing)


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
    from torch.utils.data._utils.worker import _generate_state

    base = info.seed - info.id
    object.__setattr__(info, "id", place)  # it guards itself against users who change it
    object.__setattr__(info, "seed", base + place)
    random.seed(base + place)
    torch.manual_seed(base + place)
    np.random.seed(_generate_state(base, place))


def _workers_tell(loader: Any) -> bool:
    """Others read again what they had read, and draw again, or (stateful ones) are not dealt batches in turn."""
    by_index = not isinstance(loader.dataset, IterableDataset)
    return loader.num_workers > 0 and by_index and not loader.use_stateful_dataloader


@contextmanager
def told_by_workers(loader: Any, drawing: Drawing) -> Iterator[None]:
    """Have the workers that torch's loader starts meanwhile tell what they draw from."""
    if not (_workers_tell(loader) and streams.makes_iterator(loader)):
        yield
        return
    base = loader.base_dataloader
    own = base.collate_fn, base.worker_init_fn
    worker = _Worker(base, drawing.turn, dict(drawing.workers))
    base.collate_fn, base.worker_init_fn = worker, worker.start
    try:
        yield
    finally:
        base.collate_fn, base.worker_init_fn = own
