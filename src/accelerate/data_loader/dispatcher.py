"""The loader for data that only rank 0 should read: it hands the others their part of every batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from accelerate.comm import current
from accelerate.comm.tree import slice_tensors
from accelerate.data_loader.base import PreparedLoader
from accelerate.data_loader.batch_split import batch_length, cut, join
from accelerate.data_loader.epoch import EpochLoop
from accelerate.data_loader.readers import Reader
from accelerate.data_loader.rng import undisturbed
from accelerate.data_loader.scatter_protocol import Handout, RankBatch
from accelerate.data_loader.skip_samplers import innermost_skip
from accelerate.devices import Transfer, transfers_to
from accelerate.parallel.mesh import shares_of_ranks
from accelerate.random import set_global_states, synchronize_rng_states
from accelerate.state import PartialState


class DataLoaderDispatcher(PreparedLoader):
    """A prepared loader that rank 0 reads, and of which it sends every rank its part.

    Args:
        dataset: the dataset.
        split_batches: whether one batch of the dataset is split, instead of as many being read as there are processes.
        skip_batches: how many global batches to leave out at the start.
        use_stateful_dataloader: whether to use torchdata's `StatefulDataLoader`.
        _drop_last: whether an incomplete last batch is dropped.
        _non_blocking: whether copies to the device are not waited for.
        slice_fn: `slice_fn(batch, slice, process_index=, num_processes=)`, in place of slicing every tensor.
        torch_device_mesh: a mesh whose processes along `tp`, `cp` and `sp` get the same part.
        iteration: the epoch that comes first.
        data_shares: for every rank the number of the part it gets, in place of a mesh.
        **kwargs: as for torch's `DataLoader`.
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
        data_shares: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.data_shares = data_shares
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn: Callable[..., Any] = slice_tensors if slice_fn is None else slice_fn

    def _join_process(self) -> None:
        super()._join_process()
        self.state: PartialState = PartialState()
        self._new_transfer = transfers_to(self.state.device, self._non_blocking)
        # Processes that share a layer or a sequence get the same part.
        self._share_of_rank = self.data_shares or shares_of_ranks(self.device_mesh, self.state.num_processes)

    def _synchronize(self) -> None:
        if self.synchronized_generator is not None:
            synchronize_rng_states(["generator"], self.synchronized_generator)

    def _expect(self, samples: int | None) -> None:
        """Rank 0 tells with the last batch."""

    def _batches(self, loop: EpochLoop) -> Iterator[Any]:
        transfer = self._new_transfer()
        handout = Handout(current())
        leads = self.state.is_main_process
        parts = self._lead(handout, loop, transfer) if leads else self._follow(handout)
        for part in parts:
            self.position.caught_up(self, loop)
            self.end_of_dataloader = self.ends_everywhere = part.is_last
            self.remainder = part.total_samples if part.is_last else -1
            self.adjust_state_dict_for_prefetch()
            loop.batches += 1
            loop.finished = part.is_last
            backwards = self.gradient_state.backwards
            started = transfer.start(part.batch, late=not part.is_last)
            yield self._hand_out(transfer.finish(started), part.counts)
            self._came_back(part.is_last, backwards)

    def _follow(self, handout: Handout) -> Iterator[RankBatch]:
        while (part := handout.receive()) is not None:
            yield part
            if part.is_last:
                return

    def _lead(self, handout: Handout, loop: EpochLoop, transfer: Transfer) -> Iterator[RankBatch]:
        """Read one global batch ahead, so that the last one is known when it is sent."""
        with handout.telling_errors():
            left_out = innermost_skip(loop.part.indices)
            if left_out is not None:
                left_out.keeps = self.batches_per_step
            reader = self.position.start_reading(self, loop)
            transfer.reads(reader.batches)
            first = self._skip(loop.part.skip_batches, reader.batches, handout)
            steps = self._steps(reader)
            step = next(steps, None)
            self.position.caught_up(self, loop)
        if step is None:
            handout.finish()
            return
        beginning = first or step

        def start() -> list[Any]:
            return beginning if left_out is None else self._read_again(left_out.kept)

        while step is not None:
            with handout.telling_errors():
                loop.fetched()
                self._note_state(loop.part)
                following = next(steps, None)
                if following is None:
                    self._note_state(loop.part)
                shares = self._parts(step, start, is_last=following is None)
                parts = [shares[share] for share in self._share_of_rank]
                described = handout.describe(parts)
            handout.send(parts, described)
            yield parts[0]
            step = following

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of the dataset, of which there is one."""
        return len(self.dataset)

    def _skip(self, count: int, batches: Iterator[Any], handout: Handout) -> list[Any] | None:
        """Leave batches out; those of the first step, which may have to fill up the last one, are returned."""
        first: list[Any] | None = None
        for _ in range(count):
            if not (group := list(itertools.islice(batches, self.batches_per_step))):
                break
            handout.left_out()
            first = first or group
        return first

    def _steps(self, reader: Reader) -> Iterator[list[Any]]:
        """The batches that all processes together work on in one step."""
        count = self.batches_per_step
        batches = reader.after_skipping()
        while group := reader.read(lambda: list(itertools.islice(batches, count))):
            if self._drop_last and len(group) < count:
                return
            yield group

    def _read_again(self, batches: Sequence[Any]) -> list[Any]:
        """The first batches of the epoch, which the sampler has left out, by their indices."""
        one_by_one = {"sampler": batches, "batch_size": None}
        chosen: Any = one_by_one if self.batch_sampler is None else {"batch_sampler": batches}
        with undisturbed(self):
            again = iter(DataLoader(self.dataset, collate_fn=self.collate_fn, **chosen))  # which draws a number
            if self.tracked_sampler is not None:
                set_global_states(self.tracked_sampler.epoch_rng)  # what the dataset drew for them it draws again
            return list(again)

    def _parts(self, group: list[Any], start: Callable[[], list[Any]], *, is_last: bool) -> list[RankBatch]:
        """What each process gets of the batches of one step. start: the first step of the epoch."""
        lengths = [batch_length(batch) for batch in group]
        processes = self.num_shards
        whole = len(set(lengths)) == 1 or None in lengths
        if len(group) == processes and whole and self.slice_fn is slice_tensors:
            return [RankBatch(batch, None, is_last, sum(length or 1 for length in lengths)) for batch in group]
        if None in lengths:
            raise TypeError(
                f"A batch of type {type(group[0]).__name__} has no tensor or list with one entry per sample, so it "
                f"cannot be split over {processes} ranks: pass `slice_fn_for_dispatch`, or set dispatch_batches=False."
            )
        try:
            batch = group[0] if len(group) == 1 else join(group)
        except (RuntimeError, ValueError):  # other lengths or other lists: no sample can change its batch
            return self._whole(group, is_last)
        return self._cut(batch, start, is_last)

    def _whole(self, group: list[Any], is_last: bool) -> list[RankBatch]:
        lengths = [batch_length(batch) or 0 for batch in group]
        parts = [RankBatch(batch, None, is_last, sum(lengths)) for batch in group]
        repeat = RankBatch(group[-1], (0, lengths[-1]), is_last, sum(lengths))
        return parts + [repeat] * (self.num_shards - len(parts))

    def _cut(self, batch: Any, start: Callable[[], list[Any]], is_last: bool) -> list[RankBatch]:
        processes = self.num_shards
        total = batch_length(batch) or 0
        size = -(-total // processes)
        if size * processes != total:
            batch = self._filled(batch, start(), size * processes - total)
        parts = []
        for rank in range(processes):
            piece = slice(rank * size, (rank + 1) * size)
            if self.slice_fn is slice_tensors:
                own = cut(batch, piece)
            else:
                own = self.slice_fn(batch, piece, process_index=rank, num_processes=processes)
            real = min(max(total - rank * size, 0), size)
            parts.append(RankBatch(own, None if real == size else (real, size), is_last, total))
        return parts

    @staticmethod
    def _filled(batch: Any, start: list[Any], missing: int) -> Any:
        """Repeats from the start make the pieces equally long."""
        fillers = itertools.cycle(start)
        while missing > 0:
            repeats = cut(next(fillers), slice(0, missing))
            try:
                batch = join([batch, repeats])
            except RuntimeError:  # padded to another length than the start: its own samples fit
                fillers = itertools.cycle([batch])
                continue
            missing -= batch_length(repeats) or missing
        return batch

    @property
    def batches_per_step(self) -> int:
        return 1 if self.split_batches else self.num_shards

    def __len__(self) -> int:
        share, extras = divmod(len(self.part.torch_loader), self.batches_per_step)
        steps = share if self._drop_last else share + bool(extras)
        return max(steps - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int:
        """The batch size over all processes."""
        # The sampler of a dataset that takes lists makes batches, too.
        part = self.part
        size: int = part.torch_loader.batch_size or getattr(part.indices, "batch_size", None) or 1
        return size if self.split_batches else size * self.num_shards

    @property
    def num_shards(self) -> int:
        return len(set(self._share_of_rank))
