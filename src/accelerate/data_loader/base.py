"""What all prepared loaders share: the torch loader inside, and the state of the iteration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from accelerate.comm.tree import ignorant_find_batch_size
from accelerate.data_loader.epoch import EpochLoop, EpochPart
from accelerate.data_loader.position import Position
from accelerate.data_loader.readers import TrackedSampler
from accelerate.data_loader.rng import undisturbed
from accelerate.data_loader.samplers import get_sampler
from accelerate.data_loader.torch_loaders import stateful_loader
from accelerate.state import GradientState


class DataLoaderStateMixin:
    """What a loader knows of the current batch. `begin` and `end` tell the gradient state where batches come from.

    `begin` is called only by loaders without a position (`SkipDataLoader`). `PreparedLoader.start_epoch` does the same
    for a part of an epoch.

    Attributes:
        end_of_dataloader: whether the current batch is the last one of this process.
        ends_everywhere: whether it is the last one of all processes.
        remainder: how many samples of the last global batch are not repeats; -1 if that is not known.
        real_samples: how many samples of the current batch are not repeats; None if none is a repeat.
        batch_samples: how many samples the current batch has, if some are repeats, or if it is smaller than the others.
        lengths_of_values: how many values `gather_for_metrics` was given for full batches.
    """

    end_of_dataloader: bool = False
    ends_everywhere: bool = False
    remainder: int = -1
    real_samples: int | None = None
    batch_samples: int | None = None
    lengths_of_values: set[int]

    gradient_state: GradientState

    def reset(self) -> None:
        """Back to before the first batch."""
        self.end_of_dataloader = False
        self.ends_everywhere = False
        self.remainder = -1
        self.real_samples = self.batch_samples = None
        self.lengths_of_values = set()

    def begin(self) -> None:
        """An iteration starts."""
        self._begin_with(self._known_length())

    def _begin_with(self, samples: int | None) -> None:
        """An iteration over that many samples, over all processes, starts; None if that is not known."""
        self.reset()
        self._expect(samples)
        self.gradient_state._add_dataloader(self)

    def _expect(self, samples: int | None) -> None:
        """How many samples, over all processes, the iteration has, if that is known."""
        size = getattr(self, "total_batch_size", None)
        if samples is not None and size and not getattr(self, "_drop_last", False):
            self.remainder = samples % size

    def end(self) -> None:
        """An iteration is over, or was broken off."""
        self.gradient_state._remove_dataloader(self)

    def _hand_out(self, batch: Any, counts: tuple[int, int] | None = None) -> Any:
        """The last thing before a batch goes to the loop: from here on it is the one at hand.

        counts: how many of its samples are no repeats, and how many it has; None when none is a repeat.
        """
        self.gradient_state._add_dataloader(self)
        if counts is None and self.end_of_dataloader:
            counts = self._counts_if_short(batch)
        self.real_samples, self.batch_samples = counts or (None, None)
        return batch

    def _counts_if_short(self, batch: Any) -> tuple[int, int] | None:
        """A last batch that is smaller than the others counts too: some scripts give one value per expected sample."""
        samples = ignorant_find_batch_size(batch)
        return (samples, samples) if samples is not None and samples < self.own_batch_size else None

    @property
    def own_batch_size(self) -> int:
        """How many samples a full batch of this process has."""
        processes: int = getattr(self, "num_shards", 1)
        return self.total_batch_size // processes  # type: ignore[attr-defined]

    def _known_length(self) -> int | None:
        """How many samples an epoch has, on all processes together."""
        try:
            return int(getattr(self, "total_dataset_length", None) or len(self.dataset))  # type: ignore[attr-defined]
        except (TypeError, NotImplementedError):  # a dataset without a length
            return None


@functools.cache
def _both(own: type, base: type) -> type:
    return type(own.__name__, (own, base), {"__module__": own.__module__})


class DataLoaderAdapter:
    """A loader that wraps a torch `DataLoader`, has its attributes, and passes for an instance of its class.

    Args:
        dataset: the dataset.
        use_stateful_dataloader: whether to use torchdata's `StatefulDataLoader`.
        batch_sampler: the batch sampler.
        skip_batches: how many batches to leave out at the start.
        **kwargs: as for torch's `DataLoader`.

    Attributes:
        part: the part of an epoch that is read, with the torch loader that reads it.
    """

    part: EpochPart
    # Whether anybody has asked for the length, to lay out a schedule for one.
    length_asked = False
    # The torch loader whose workers stay, once it has been iterated: it is iterated again.
    reused: Any = None
    # The generator that follows that of rank 0, if any does.
    synchronized_generator: torch.Generator | None = None
    # Those of the torch loader.
    dataset: Any
    sampler: Any
    batch_sampler: Any
    num_workers: int
    persistent_workers: bool

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: BatchSampler | None = None,
        skip_batches: int = 0,
        **kwargs: Any,
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        make: Any = stateful_loader if use_stateful_dataloader else DataLoader
        self.part = EpochPart(make(dataset, batch_sampler=batch_sampler, **kwargs), skip_batches)
        self.dl_state_dict: dict[str, Any] | None = None

    @property
    def base_dataloader(self) -> Any:
        """The torch loader inside."""
        return self.part.torch_loader

    @property
    def skip_batches(self) -> int:
        """How many steps are read and thrown away at the start."""
        return self.part.skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "part":
            raise AttributeError(name)
        return getattr(self.part.torch_loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # `isinstance(prepared, DataLoader)` is asked in many scripts, and the answer should be yes.
        part = self.__dict__.get("part")
        return type(self) if part is None else _both(type(self), type(part.torch_loader))  # type: ignore[arg-type]

    def __len__(self) -> int:
        self.length_asked = True
        return max(len(self.part.torch_loader) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.part.torch_loader)

    def __reduce__(self) -> Any:
        # Not the default, which objects to a `__class__` that is not the type. What belongs to this process alone
        # (which state it reports to, and the accelerator that stands in for it) does not travel.
        own = {name: value for name, value in self.__dict__.items() if name not in self._of_this_process}
        return _revived, (type(self), own)

    _of_this_process: tuple[str, ...] = (
        "gradient_state",
        "on_uneven_end",
        "between_batches",
        "_rest_of",
        "tracked_sampler",
        "state",
        "reused",
        "_new_transfer",
    )

    def _join_process(self) -> None:
        """Find what belongs to the process that this loader has come to."""
        self.gradient_state: GradientState = GradientState()

    def forget_workers(self) -> None:
        """Have the next iteration start new workers, where those of the last one have stayed."""
        if self.use_stateful_dataloader:
            self.part.torch_loader.load_state_dict({})
        elif self.reused is self.part.torch_loader:
            self.part = self.part.again()
        self.reused = None

    def get_sampler(self) -> Any:
        """The sampler of indices underneath all batching and sharding."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of indices.

        Args:
            sampler: the new sampler.
        """
        owner = self.part.sampler_owner
        if owner is None:
            raise ValueError("A loader over an iterable dataset has no sampler to replace.")
        owner.sampler = sampler

    def state_dict(self) -> dict[str, Any] | None:
        """Where the stateful loader stood when the batch at hand was handed out."""
        if self.dl_state_dict is None and self.use_stateful_dataloader:
            # Before the first one. The iterator that it makes to tell its state must not be that of the first epoch,
            # whose order is not to be drawn yet.
            with undisturbed(self):
                self.dl_state_dict = self.part.torch_loader.state_dict()
            self.part.torch_loader.load_state_dict({})
        return self.dl_state_dict

    def forget_state(self) -> None:
        """Have a stateful loader start at the beginning, though a state was loaded."""
        if self.use_stateful_dataloader:
            self.part.torch_loader.next_iter_state = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position (stateful loaders only).

        Args:
            state_dict: what `state_dict` returned.
        """
        self.part.torch_loader.load_state_dict(state_dict)
        self.reused = None  # a stateful loader starts new workers then
        self.dl_state_dict = dict(state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Say in the position whether the batch at hand was the last: the loader itself is one batch ahead."""
        if self.dl_state_dict is not None:
            self.dl_state_dict["_iterator_finished"] = getattr(self, "end_of_dataloader", False)

    def _note_state(self, part: EpochPart) -> None:
        """Called before the next batch is fetched, so that the state is that of the batch at hand."""
        if self.use_stateful_dataloader:
            self.dl_state_dict = part.torch_loader.state_dict()
            self.adjust_state_dict_for_prefetch()


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """What `prepare` makes of a loader: one that knows its position, and can go on from a saved one.

    iteration: the epoch that is read, or comes next.
    """

    # Called when a loop that trains comes back for another batch; with begins=True before the first one of all.
    between_batches: Callable[..., None] | None = None
    # Told when this process has run out of batches before others: the accelerator stands in for it.
    on_uneven_end: Any = None
    # Whether to note which samples each batch has; see `samples_at_hand`.
    notes_samples: bool = False
    tracked_sampler: TrackedSampler | None = None
    # The loader that this one reads the rest of an epoch of: one of `skip_first_batches`.
    _rest_of: PreparedLoader | None = None

    def __init__(
        self,
        dataset: Any,
        *,
        torch_device_mesh: Any = None,
        synchronized_generator: torch.Generator | None = None,
        iteration: int = 0,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        _follows_rank_0: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device_mesh = torch_device_mesh
        self.synchronized_generator = synchronized_generator
        self.iteration = iteration
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._follows_rank_0 = _follows_rank_0
        self.position = Position()
        self._join_process()

    # --- an epoch -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self.between_batches is not None and self._may_be_saved(loops=0):
            self.between_batches(begins=not self.position.trains)
        loop = self.position.begin(self)
        backwards = self.gradient_state.backwards
        try:
            yield from self._batches(loop)
            if self.on_uneven_end is not None:
                self.on_uneven_end(self, backwards)
        except GeneratorExit:
            if self.on_uneven_end is not None:
                self.on_uneven_end.broken_off(self)
            raise
        finally:
            # Also after a `break`: the next iteration is another epoch, and the current batch is no longer ours.
            self.position.caught_up(self, loop)
            if self.position.end(loop):
                self.iteration += 1
                if self._rest_of is not None:
                    self._rest_of.iteration = self.iteration
            self.end()

    def start_epoch(self, part: EpochPart) -> None:
        """Begin an iteration: random states follow rank 0, and samplers and dataset are told the epoch.

        Args:
            part: the part of the epoch that is going to be read.
        """
        if self._follows_rank_0:
            self._synchronize()
        self._begin_with(part.samples_left)
        part.set_epoch(self.iteration)

    def _synchronize(self) -> None:
        """Have random states follow those of rank 0."""
        raise NotImplementedError

    def _batches(self, loop: EpochLoop) -> Iterator[Any]:
        """The batches of an iteration, which has begun."""
        raise NotImplementedError

    def _came_back(self, last: bool, backwards: int) -> None:
        """The loop has done with the batch at hand: this is where preemption listens (`between_batches`).

        last: whether the loop ends now. backwards: how many there were before this batch.
        """
        if self.between_batches is not None:
            self.position.trains = self.gradient_state.backwards > backwards
            if self.position.trains and not last and self._may_be_saved(loops=1):
                self.between_batches()

    def _may_be_saved(self, loops: int) -> bool:
        """Whether a run that is saved here finds its way back: not into a loop inside of another one, nor to an
        evaluation. And whether all ranks come here equally often."""
        active = [loader for loader in self.gradient_state.dataloader_references if loader is not None]
        even: bool = getattr(getattr(self, "_shard", None), "even_batches", True)
        return even and len(active) == loops and torch.is_grad_enabled()

    def samples_at_hand(self) -> tuple[int, int, list[Any] | None] | None:
        """The epoch, the number of the batch at hand in it, and the indices of its samples, where they are noted."""
        loop = self.position.current()
        if loop is None:
            return None
        number = loop.batches - 1
        return loop.epoch, number, None if self.tracked_sampler is None else self.tracked_sampler.of_batch(number)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, here and in every sampler or dataset with a `set_epoch`.

        Args:
            epoch: the number of the epoch.
        """
        self.iteration = epoch
        self.part.set_epoch(epoch)

    # --- its parts ----------------------------------------------------------------------------------------------

    @property
    def whole_epoch(self) -> EpochPart:
        """The epoch that this loader reads, or reads the rest of."""
        return self.part if self._rest_of is None else self._rest_of.part

    @property
    def total_dataset_length(self) -> int:
        """The number of samples over all processes."""
        return self.part.total_length

    @property
    def num_shards(self) -> int:
        """How many processes, or groups of them, get samples of their own."""
        return getattr(self.part.shard, "num_processes", 1)

    @property
    def total_batch_size(self) -> int:
        """The batch size over all processes."""
        shard = self.part.shard
        size = getattr(shard, "batch_size", None) or 1
        return size if getattr(shard, "split_batches", False) else size * self.num_shards

    @property
    def batches_per_step(self) -> int:
        """How many batches of the torch loader one step of the loop consumes."""
        return 1

    def without_first(self, count: int) -> Any:
        """Make a loader for the rest of this epoch, as `skip_first_batches` does.

        Args:
            count: how many batches are done, in a loaded checkpoint or not.

        Returns:
            A loader of the same class, which shares this one's position.
        """
        self.forget_state()  # or else the loaded position would be skipped to twice
        rest: Any = object.__new__(type(self))
        rest.__dict__.update(self.__dict__, part=self.position.part_after(count, self))
        rest._rest_of = self if self._rest_of is None else self._rest_of
        rest.reused = rest.tracked_sampler = rest.dl_state_dict = None
        rest.reset()
        return rest


def _revived(kind: type[DataLoaderAdapter], own: dict[str, Any]) -> DataLoaderAdapter:
    """A pickled or copied loader, on the other side."""
    loader = kind.__new__(kind)
    loader.__dict__.update(own)
    loader._join_process()
    return loader
