"""The usual prepared loader: every process reads its own share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from accelerate.data_loader.base import PreparedLoader
from accelerate.data_loader.epoch import EpochLoop, EpochPart
from accelerate.data_loader.iterable import PartlyRepeated
from accelerate.devices import transfers_to
from accelerate.random import synchronize_rng_states


class DataLoaderShard(PreparedLoader):
    """A prepared loader of which every process reads its own shard.

    It is one batch ahead of the loop, so that the last batch is known while it is processed.

    Args:
        dataset: the dataset.
        device: where batches are moved; None leaves them where they are.
        rng_types: the random states that follow rank 0 at the start of each epoch.
        synchronized_generator: the generator that follows rank 0, with `"generator"` among `rng_types`.
        skip_batches: how many batches to leave out at the start.
        use_stateful_dataloader: whether to use torchdata's `StatefulDataLoader`.
        _drop_last: whether an incomplete last batch is dropped.
        _non_blocking: whether copies to the device are not waited for.
        torch_device_mesh: the mesh that the loader was prepared for.
        iteration: the epoch that comes first.
        **kwargs: as for torch's `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
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
        self._device = device
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            synchronized_generator=synchronized_generator,
            iteration=iteration,
            **kwargs,
        )
        self.rng_types = rng_types

    def _join_process(self) -> None:
        super()._join_process()
        self.device = self._device

    @property
    def device(self) -> torch.device | str | int | None:
        """Where batches go; None leaves them where they are. A script may assign another one between two epochs."""
        return self._device

    @device.setter
    def device(self, device: torch.device | str | int | None) -> None:
        self._device = device
        self._new_transfer = transfers_to(device, self._non_blocking)

    def _synchronize(self) -> None:
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)

    def _batches(self, loop: EpochLoop) -> Iterator[Any]:
        part = loop.part
        transfer = self._new_transfer()
        counts_of = getattr(part.shard, "counts", None) or _none_repeated
        tells_position = self.use_stateful_dataloader or loop.moved_dataset is not None

        def fetch() -> tuple[Any, tuple[int, int] | None] | None:
            batch, counts = reader.read(take), None
            if batch is _END:
                return None
            if type(batch) is PartlyRepeated:
                batch, counts = batch.batch, batch.counts
            return transfer.start(batch), counts

        reader = self.position.start_reading(self, loop)
        transfer.reads(reader.batches)
        for _ in range(part.skip_batches):
            if next(reader.batches, _END) is _END:
                break
        take = functools.partial(next, reader.after_skipping(), _END)
        upcoming = fetch()
        self.position.caught_up(self, loop)
        if upcoming is None:
            self._set_end(part)
        index = part.skip_batches
        while upcoming is not None:
            current, counts = upcoming
            if tells_position:
                loop.fetched()
                self._note_state(part)
            transfer.wait()
            upcoming = fetch()
            # Set for every batch: the same loader may be iterated again inside the loop.
            last = upcoming is None
            if last:
                self._set_end(part)
            else:
                self.end_of_dataloader = self.ends_everywhere = False
            if self.on_uneven_end is not None:
                self.on_uneven_end.next_batch(self.gradient_state.backwards)
            loop.batches += 1
            loop.finished = last
            backwards = self.gradient_state.backwards
            yield self._hand_out(transfer.finish(current), counts or counts_of(-1 if last else index))
            index += 1
            self._came_back(last, backwards)

    def _set_end(self, part: EpochPart) -> None:
        self.end_of_dataloader = True
        self.ends_everywhere = getattr(part.shard, "missed_steps", 0) == 0
        self._note_state(part)

    def _counts_if_short(self, batch: Any) -> tuple[int, int] | None:
        if getattr(self.part.shard, "even_batches", False) or (self.num_shards == 1 and self.remainder == 0):
            return None  # all batches are full
        if self.num_shards == 1 and self.remainder > 0:
            return self.remainder, self.remainder
        return super()._counts_if_short(batch)

    @property
    def _shard(self) -> Any:
        """What decides which samples this process gets, in the loop that goes on."""
        loop = self.position.current()
        return (self.part if loop is None else loop.part).shard


_END: Any = object()


def _none_repeated(number: int) -> None:
    """The counts of a loader that repeats nothing."""
