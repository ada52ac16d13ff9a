"""The loader for data that only rank 0 should read: it hands the others their part of every batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accelerate.comm import current
from accelerate.comm.tree import concatenate, find_batch_size, slice_tensors
from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin, forward_epoch
from accelerate.data_loader.dispatch import Handout, Part
from accelerate.data_loader.transfer import transfer_to
from accelerate.errors import NotYetSupported
from accelerate.random import synchronize_rng_states
from accelerate.state import GradientState, PartialState


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """Rank 0 reads, every rank gets its slice.

    split_batches: cut one batch of the dataset into pieces, instead of reading as many batches as there are
    processes. skip_batches: how many global batches to leave out at the start.
    slice_fn: `slice_fn(batch, slice, process_index=, num_processes=)`, in place of slicing every tensor.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        if torch_device_mesh is not None:
            raise NotYetSupported("A loader over a device mesh", "leave `torch_device_mesh` out.")
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self.state = PartialState()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self.iteration = iteration
        self.synchronized_generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.synchronized_generator is not None:
            synchronize_rng_states(["generator"], self.synchronized_generator)
        self.begin()
        self.remainder = -1
        self.set_epoch(self.iteration)
        transfer = transfer_to(self.state.device, self._non_blocking)
        handout = Handout(current())
        parts = self._lead(handout) if self.state.is_main_process else self._follow(handout)
        try:
            for index, part in enumerate(parts):
                self.end_of_dataloader = self.ends_everywhere = part.is_last
                self.remainder = part.total_samples if part.is_last else -1
                self.real_samples = None if part.real_samples < 0 else part.real_samples
                if index >= self.skip_batches:
                    yield self._hand_out(transfer.finish(transfer.start(part.batch)))
        finally:
            self.iteration += 1
            self.end()

    def _follow(self, handout: Handout) -> Iterator[Part]:
        while (part := handout.receive()) is not None:
            yield part
            if part.is_last:
                return

    def _lead(self, handout: Handout) -> Iterator[Part]:
        """Read one global batch ahead, so that the last one is known when it is sent."""
        batches = self._global_batches()
        batch = next(batches, None)
        if batch is None:
            handout.finish()
            return
        start = batch
        while batch is not None:
            self._note_position()
            following = next(batches, None)
            parts = self._cut(batch, start, is_last=following is None)
            handout.send(parts)
            yield parts[0]
            batch = following

    def _global_batches(self) -> Iterator[Any]:
        """What all processes together work on in one step."""
        batches = iter(self.base_dataloader)
        if self.split_batches:
            yield from batches
            return
        while group := list(itertools.islice(batches, self.state.num_processes)):
            if self._drop_last and len(group) < self.state.num_processes:
                return
            yield group[0] if len(group) == 1 else concatenate(group, dim=0)

    def _cut(self, batch: Any, start: Any, *, is_last: bool) -> list[Part]:
        processes = self.state.num_processes
        total = find_batch_size(batch)
        assert total is not None
        size = -(-total // processes)
        if size * processes != total:
            # Repeats from the start make the pieces equally long.
            missing, filler = size * processes - total, find_batch_size(start) or 1
            repeats = [
                slice_tensors(start, slice(0, min(filler, missing - done))) for done in range(0, missing, filler)
            ]
            batch = concatenate([batch, *repeats], dim=0)
        parts = []
        for rank in range(processes):
            piece = self.slice_fn(
                batch, slice(rank * size, (rank + 1) * size), process_index=rank, num_processes=processes
            )
            real = min(max(total - rank * size, 0), size)
            parts.append(Part(piece, -1 if real == size else real, is_last, total))
        return parts

    def own_arguments(self) -> dict[str, Any]:
        return super().own_arguments() | {
            "split_batches": self.split_batches,
            "_drop_last": self._drop_last,
            "_non_blocking": self._non_blocking,
            "slice_fn": self.slice_fn,
            "iteration": self.iteration,
        }

    @property
    def batches_per_step(self) -> int:
        return 1 if self.split_batches else self.state.num_processes

    def __len__(self) -> int:
        length = len(self.base_dataloader)
        if self.split_batches:
            return length
        share, extras = divmod(length, self.state.num_processes)
        return share if self._drop_last else share + bool(extras)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, here and in whatever sampler or dataset knows of epochs."""
        self.iteration = epoch
        forward_epoch(self, epoch)

    @property
    def total_batch_size(self) -> int:
        """The batch size over all processes."""
        size: int = self.base_dataloader.batch_size or getattr(self.batch_sampler, "batch_size", None) or 1
        return size if self.split_batches else size * self.state.num_processes

    @property
    def total_dataset_length(self) -> int:
        """The number of samples over all processes."""
        return len(self.dataset)
