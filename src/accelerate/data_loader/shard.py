"""The usual prepared loader: every process reads its own share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin, forward_epoch
from accelerate.data_loader.iterable import IterableDatasetShard, PartlyRepeated
from accelerate.data_loader.position import Place
from accelerate.devices import transfer_to
from accelerate.random import synchronize_rng_states


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that is one batch ahead of the loop, so that the last batch is known while it is processed.

    device: where batches are moved to (None: nowhere). rng_types, synchronized_generator: which random states follow
    those of rank 0 at the start of each iteration. skip_batches: how many batches to leave out at the start.
    """

    # Told when this process has run out of batches before others: the accelerator stands in for it.
    on_uneven_end: Any = None

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device_mesh = torch_device_mesh
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._join_process()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration

    def __iter__(self) -> Iterator[Any]:
        self._starts()
        if (rest := self.position.rest_of(self)) is not None:
            yield from rest
            return
        self.position.rewind(self)
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.begin()
        self.set_epoch(self.iteration)
        place = self.position.begin(self)
        backwards = self.gradient_state.backwards
        try:
            yield from self._batches(place)
            if self.on_uneven_end is not None:
                self.on_uneven_end(self, backwards)
        except GeneratorExit:
            if self.on_uneven_end is not None:
                self.on_uneven_end.broken_off(self)
            raise
        finally:
            # Also after a `break`: the next iteration is another epoch, and the current batch is no longer ours.
            self._end_of(place)

    def _batches(self, place: Place) -> Iterator[Any]:
        transfer = transfer_to(self.device, self._non_blocking)
        counts_of = getattr(self._shard, "counts", None) or _none_repeated
        tells_position = self.use_stateful_dataloader or self.position.follows_dataset

        def fetch() -> tuple[Any, tuple[int, int] | None] | None:
            batch, counts = reader.read(take), None
            if batch is _END:
                return None
            if type(batch) is PartlyRepeated:
                batch, counts = batch.batch, batch.counts
            return transfer.start(batch), counts

        try:
            batches = self.position.iterate(self, place)
            transfer.reads(batches)
            reader = self.position.reader(self, place)
            for _ in range(self.skip_batches):
                if next(batches, _END) is _END:
                    break
            take = functools.partial(next, reader.over(batches), _END)
            upcoming = fetch()
        finally:
            self.position.caught_up(self)
        if upcoming is None:
            self._set_end(True)
        index = self.skip_batches
        while upcoming is not None:
            current, counts = upcoming
            if tells_position:
                self._note_position(place)
            transfer.wait()
            upcoming = fetch()
            # Set for every batch: the same loader may be iterated again inside the loop.
            last = upcoming is None
            self._set_end(last)
            if self.on_uneven_end is not None:
                self.on_uneven_end.next_batch(self.gradient_state.backwards)
            place.handed_out(last)
            backwards = self.gradient_state.backwards
            yield self._hand_out(transfer.finish(current), counts or counts_of(-1 if last else index))
            index += 1
            self._came_back(last, backwards)

    def _set_end(self, last: bool) -> None:
        self.end_of_dataloader = self.ends_everywhere = last
        if last:
            self.ends_everywhere = getattr(self._shard, "missed_steps", 0) == 0
            self._note_state()

    def own_arguments(self) -> dict[str, Any]:
        return super().own_arguments() | {
            "device": self.device,
            "rng_types": self.rng_types,
            "synchronized_generator": self.synchronized_generator,
            "_drop_last": self._drop_last,
            "_non_blocking": self._non_blocking,
            "torch_device_mesh": self.device_mesh,
            "iteration": self.iteration,
        }

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, here and in whatever sampler or dataset knows of epochs."""
        self.iteration = epoch
        forward_epoch(self, epoch)

    @property
    def total_batch_size(self) -> int:
        """The batch size over all processes."""
        shard = self._shard
        size = getattr(shard, "batch_size", None) or 1
        return size if getattr(shard, "split_batches", False) else size * self._shares

    def _counts_if_short(self, batch: Any) -> tuple[int, int] | None:
        if getattr(self._shard, "even_batches", False) or (self._shares == 1 and self.remainder == 0):
            return None  # all batches are full
        if self._shares == 1 and self.remainder > 0:
            return self.remainder, self.remainder
        return super()._counts_if_short(batch)

    @property
    def _shares(self) -> int:
        return getattr(self._shard, "num_processes", 1)

    @property
    def _shard(self) -> Any:
        """What decides which samples this process gets."""
        if isinstance(self.dataset, IterableDataset):
            return self.dataset if isinstance(self.dataset, IterableDatasetShard) else self.base_dataloader
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def total_dataset_length(self) -> int:
        """The number of samples over all processes."""
        if hasattr(self.dataset, "total_length"):
            return int(self.dataset.total_length)
        return len(self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset)


_END: Any = object()


def _none_repeated(number: int) -> None:
    """The counts of a loader that repeats nothing."""
