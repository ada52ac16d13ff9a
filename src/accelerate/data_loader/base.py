"""What all prepared loaders share: the torch loader inside, and the state of the iteration."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.available import is_torchdata_stateful_dataloader_available
from accelerate.comm.tree import ignorant_find_batch_size
from accelerate.data_loader.draws import Samples
from accelerate.data_loader.iterable import skips_samples, without_first_samples
from accelerate.data_loader.position import Place, Position
from accelerate.data_loader.rest import SkipSampler, without_batches, without_samples
from accelerate.data_loader.samplers import SamplerShard, get_sampler, sampler_owner
from accelerate.data_loader.streams import undisturbed
from accelerate.state import GradientState


class DataLoaderStateMixin:
    """Where an iteration stands. `begin` and `end` tell the gradient state which loader batches come from.

    end_of_dataloader: whether the batch at hand is this process's last.
    ends_everywhere: whether it is the last one of all processes.
    remainder: how many samples of the last global batch are no repeats, -1 when that is not known.
    real_samples: how many samples of this process's batch at hand are no repeats, None for a full batch without.
    batch_samples: how many samples that batch has, where some are repeats, or where it is smaller than the others.
    lengths_of_values: how many values `gather_for_metrics` was given for full batches.
    """

    end_of_dataloader: bool = False
    ends_everywhere: bool = False
    remainder: int = -1
    real_samples: int | None = None
    batch_samples: int | None = None
    lengths_of_values: set[int]

    gradient_state: GradientState
    position: Position
    iteration: int = 0
    _continued: Any = None
    # Of the epoch, before the first batch of this loader: samples in batches of another size, then batches;
    # and in how many steps all of them were.
    _left_out_samples = 0
    _left_out_batches = 0
    _left_out_steps = 0
    # Called when a loop that trains comes back for another batch, if not for the first one of all.
    between_batches: Callable[[], None] | None = None
    # Whether to note which samples each batch has; see `samples_at_hand`.
    notes_samples = False
    noted_samples: Samples | None = None
    # What the dataset drew from when the batches before were done, until the loader is iterated.
    _goes_on_with: dict[str, Any] | None = None

    def reset(self) -> None:
        """Back to before the first batch."""
        self.end_of_dataloader = False
        self.ends_everywhere = False
        self.remainder = -1
        self.real_samples = self.batch_samples = None
        self.lengths_of_values = set()

    def begin(self) -> None:
        """An iteration starts."""
        self.reset()
        length, size = self._known_length(), getattr(self, "total_batch_size", None)
        if length is not None and size and not getattr(self, "_drop_last", False):
            self.remainder = length % size
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """An iteration is over, or was broken off."""
        self.gradient_state._remove_dataloader(self)

    def _end_of(self, place: Place) -> None:
        """The iteration at that place is over: the next one is another epoch, unless a checkpoint has said which."""
        if self.position.end(place):
            self.iteration += 1
            if self._continued is not None:
                # The rest of an epoch was read: the loader it belongs to goes on with the next one.
                self._continued.iteration = self.iteration
        self.end()

    def _hand_out(self, batch: Any, counts: tuple[int, int] | None = None) -> Any:
        """The last thing before a batch goes to the loop: from here on it is the one at hand.

        counts: how many of its samples are no repeats, and how many it has; None when none is a repeat.
        """
        self.gradient_state._add_dataloader(self)
        if counts is None and self.end_of_dataloader:
            counts = self._counts_if_short(batch)
        self.real_samples, self.batch_samples = counts or (None, None)
        return batch

    def _came_back(self, last: bool, backwards: int) -> None:
        """The loop has done with the batch at hand. last: and ends now. backwards: how many there were before it."""
        if self.between_batches is not None:
            self.position.trains = self.gradient_state.backwards > backwards
            if self.position.trains and not last and self._may_be_saved(loops=1):
                self.between_batches()

    def _starts(self) -> None:
        """A loop is about to begin."""
        if self.between_batches is not None and self.position.trains and self._may_be_saved(loops=0):
            self.between_batches()

    def _may_be_saved(self, loops: int) -> bool:
        """Whether a run that is saved here finds its way back: not into a loop inside of another one, nor to an
        evaluation. And whether all ranks come here equally often."""
        active = [loader for loader in self.gradient_state.dataloader_references if loader is not None]
        even: bool = getattr(getattr(self, "_shard", None), "even_batches", True)
        return even and len(active) == loops and torch.is_grad_enabled()

    def samples_at_hand(self) -> tuple[int, int, list[Any] | None] | None:
        """The epoch, the number of the batch at hand in it, and the indices of its samples, where they are noted."""
        place = self.position.at_hand()
        if place is None:
            return None
        noted = self.noted_samples
        return place.epoch, place.batches - 1, None if noted is None else noted.of_batch(place.batches - 1)

    def _counts_if_short(self, batch: Any) -> tuple[int, int] | None:
        """A last batch that is smaller than the others counts too: some scripts give one value per expected sample."""
        samples = ignorant_find_batch_size(batch)
        return (samples, samples) if samples is not None and samples < self.own_batch_size else None

    @property
    def own_batch_size(self) -> int:
        """How many samples a full batch of this process has."""
        processes: int = getattr(self, "_shares", 1)
        return self.total_batch_size // processes  # type: ignore[attr-defined]

    def _known_length(self) -> int | None:
        try:
            length = int(getattr(self, "total_dataset_length", None) or len(self.dataset))  # type: ignore[attr-defined]
            # A dataset that leaves samples out by itself has told the length of the rest.
            return length if skips_samples(self.dataset) else max(length - self._left_out_samples, 0)  # type: ignore[attr-defined]
        except (TypeError, NotImplementedError):  # a dataset without a length
            return None


# What a loader for the rest of an epoch has from the one it stands for.
_CARRIED = ("on_uneven_end", "between_batches", "synchronized_generator", "notes_samples")

# Everything a torch DataLoader was made with, apart from what decides its batches.
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def kept_arguments(loader: Any) -> dict[str, Any]:
    """The arguments for a new loader that reads in the same way as `loader`."""
    arguments = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if arguments.get("num_workers") == 0:
        # torch refuses these without workers, even at their own defaults
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            arguments.pop(name, None)
    if not arguments.get("pin_memory_device"):
        arguments.pop("pin_memory_device", None)  # deprecated: naming it at all makes torch warn
    return arguments


def same_batches(loader: Any) -> dict[str, Any]:
    """The arguments for a new loader with the same batches as `loader`."""
    if isinstance(loader.dataset, IterableDataset):
        # torch makes up samplers for these, and refuses to be given them
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {"batch_size": None, "sampler": loader.sampler}


def skipped_batches(loader: Any, count: int) -> dict[str, Any] | None:
    """The arguments for a new loader whose sampler leaves `count` batches out; None where no sampler decides."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(loader.sampler, (SamplerShard, BatchSampler)):
        return {"sampler": without_batches(loader.sampler, count), "batch_size": None}
    if loader.batch_sampler is not None:
        return {"batch_sampler": without_batches(loader.batch_sampler, count)}
    return {"sampler": SkipSampler(loader.sampler, count), "batch_size": None}


@functools.cache
def _both(own: type, base: type) -> type:
    return type(own.__name__, (own, base), {"__module__": own.__module__})


class DataLoaderAdapter:
    """A loader that holds a torch `DataLoader` (or torchdata's stateful one), passes for it, and lends its
    attributes."""

    skip_batches = 0
    # Whether anybody has asked for the length, to lay out a schedule for one.
    length_asked = False
    # The loader of torch whose workers stay, once it has been iterated: it is iterated again.
    reused: Any = None
    _continued: Any

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: BatchSampler | None = None,
        **kwargs: Any,
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        make: Any = _stateful_loader if use_stateful_dataloader else DataLoader
        self.base_dataloader: Any = make(dataset, batch_sampler=batch_sampler, **kwargs)
        self.dl_state_dict: dict[str, Any] | None = None
        self.position: Position = Position()

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # `isinstance(prepared, DataLoader)` is asked in many scripts, and the answer should be yes.
        base = self.__dict__.get("base_dataloader")
        return type(self) if base is None else _both(type(self), type(base))  # type: ignore[arg-type]

    def __len__(self) -> int:
        self.length_asked = True
        return max(len(self.base_dataloader) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base_dataloader)

    def __reduce__(self) -> Any:
        # Not the default, which objects to a `__class__` that is not the type. What belongs to this process alone
        # (which state it reports to, and the accelerator that stands in for it) does not travel.
        own = {name: value for name, value in self.__dict__.items() if name not in self._of_this_process}
        return _revived, (type(self), own)

    _of_this_process: tuple[str, ...] = (
        "gradient_state",
        "on_uneven_end",
        "between_batches",
        "_continued",
        "noted_samples",
        "state",
        "reused",
    )

    def _join_process(self) -> None:
        """Find what belongs to the process that this loader has come to."""
        self.gradient_state: GradientState = GradientState()

    def torch_loader(self, indices: Any, **changes: Any) -> DataLoader[Any]:
        """One more loader of torch that reads as the one inside does, but by other indices (or batches of them)."""
        batches = {"sampler": indices, "batch_size": None} if self.batch_sampler is None else {"batch_sampler": indices}
        return DataLoader(self.dataset, **(kept_arguments(self.base_dataloader) | changes), **batches)

    def forget_workers(self) -> None:
        """Have the next iteration start new workers, where those of the last one have stayed."""
        if self.use_stateful_dataloader:
            self.base_dataloader.load_state_dict({})
        elif self.reused is self.base_dataloader:
            base = self.base_dataloader
            self.base_dataloader = DataLoader(base.dataset, **kept_arguments(base), **same_batches(base))
        self.reused = None

    def get_sampler(self) -> Any:
        """The sampler of indices underneath all batching and sharding."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of indices."""
        owner = sampler_owner(self)
        if owner is None:
            raise ValueError("A loader over an iterable dataset has no sampler to replace.")
        owner.sampler = sampler

    def own_arguments(self) -> dict[str, Any]:
        """What this loader was made with besides the arguments of torch's loader."""
        return {"use_stateful_dataloader": self.use_stateful_dataloader}

    @property
    def batches_per_step(self) -> int:
        """How many batches of the torch loader one step of the loop consumes."""
        return 1

    def without_first(self, count: int) -> Any:
        """The same loader for the rest of an epoch of which `count` batches are done, in a loaded checkpoint or not."""
        self.forget_state()  # or else the place that was loaded would be skipped to twice
        if self.position.asked_to_skip(count, self):
            return self.position.rest_of(self)
        rest = self.after(count)
        rest._goes_on_with = self.position.drawn_after(count)
        return rest

    def after(self, count: int) -> Any:
        """The same loader without the first `count` batches that it has itself."""
        skipped = skipped_batches(self, count * self.batches_per_step)
        skip_batches = self.skip_batches + (count if skipped is None else 0)
        loader = self._continuation(self.dataset, skip_batches, skipped or same_batches(self))
        loader._left_out_batches += count
        loader._left_out_steps += count
        return loader

    def without_samples(self, count: int) -> Any:
        """The same loader for the rest of an epoch of which `count` samples are done, in batches of any size."""
        dataset, batches, skip_batches = self.dataset, same_batches(self), 0
        if not isinstance(dataset, IterableDataset):
            batches = {name: _rest(name, value, count) for name, value in batches.items()}
        elif self.num_workers == 0:
            dataset = without_first_samples(dataset, count)
        else:
            # Only the workers know whose sample is the next one: whole steps, and rather one sample twice than none.
            skip_batches = count // self.total_batch_size
        loader = self._continuation(dataset, skip_batches, batches)
        loader._left_out_samples += count
        return loader

    def going_on(self, samples: int) -> Any:
        """The same loader for the rest of an epoch whose dataset stands behind its first `samples` samples already."""
        loader = self._continuation(self.dataset, 0, same_batches(self))
        loader._left_out_samples += samples
        return loader

    def _continuation(self, dataset: Any, skip_batches: int, batches: dict[str, Any]) -> Any:
        """A loader with other batches that stands for this one until the epoch ends."""
        make: Any = type(self)
        arguments = kept_arguments(self) | self.own_arguments()
        loader = make(dataset, skip_batches=skip_batches, **arguments, **batches)
        for name in (*_CARRIED, "gradient_state", "position"):
            if name in self.__dict__:
                setattr(loader, name, self.__dict__[name])
        for name in ("_left_out_samples", "_left_out_batches", "_left_out_steps"):
            setattr(loader, name, getattr(self, name))
        loader._continued = self if self.__dict__.get("_continued") is None else self._continued
        return loader

    def state_dict(self) -> dict[str, Any] | None:
        """Where the stateful loader stood when the batch at hand was handed out."""
        if self.dl_state_dict is None and self.use_stateful_dataloader:
            # Before the first one. The iterator that it makes to tell its state must not be that of the first epoch,
            # whose order is not to be drawn yet.
            with undisturbed(self):
                self.dl_state_dict = self.base_dataloader.state_dict()
            self.base_dataloader.load_state_dict({})
        return self.dl_state_dict

    def forget_state(self) -> None:
        """Have a stateful loader start at the beginning, though a state was loaded."""
        if self.use_stateful_dataloader:
            self.base_dataloader.next_iter_state = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of `state_dict` (stateful loaders only)."""
        self.base_dataloader.load_state_dict(state_dict)
        self.reused = None  # a stateful loader starts new workers then
        self.dl_state_dict = dict(state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Say in the position whether the batch at hand was the last: the loader itself is one batch ahead."""
        if self.dl_state_dict is not None:
            self.dl_state_dict["_iterator_finished"] = getattr(self, "end_of_dataloader", False)

    def _note_position(self, place: Place) -> None:
        """Called before the next batch is fetched, so that the position is that of the batch at hand."""
        self.position.fetched(self, place)
        self._note_state()

    def _note_state(self) -> None:
        if self.use_stateful_dataloader:
            self.dl_state_dict = self.base_dataloader.state_dict()
            self.adjust_state_dict_for_prefetch()


def _rest(argument: str, batches: Any, count: int) -> Any:
    """What decides the batches of a loader (an argument of it), after `count` samples."""
    if batches is None:  # batch_size=None
        return None
    # A batch sampler need not be of torch's class.
    if argument == "batch_sampler" or isinstance(batches, (BatchSampler, SamplerShard)):
        return without_samples(batches, count)
    return SkipSampler(batches, count)


def _revived(kind: type[DataLoaderAdapter], own: dict[str, Any]) -> DataLoaderAdapter:
    """A pickled or copied loader, on the other side."""
    loader = kind.__new__(kind)
    loader.__dict__.update(own)
    loader._join_process()
    return loader


def _stateful_loader(dataset: Any, **kwargs: Any) -> Any:
    if not is_torchdata_stateful_dataloader_available():
        raise ImportError("use_stateful_dataloader=True needs torchdata 0.8 or later: pip install 'torchdata>=0.8'")
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        # torchdata calls what torch is about to drop; nothing that a script could change.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(dataset, **kwargs)


def forward_epoch(loader: Any, epoch: int) -> None:
    """Tell everything in a loader that knows of epochs which one this is."""
    batches = None if isinstance(loader.dataset, IterableDataset) else loader.batch_sampler
    while batches is not None:
        if hasattr(batches, "set_epoch"):
            batches.set_epoch(epoch)
        batches = getattr(batches, "batch_sampler", None)
    sampler = get_sampler(loader)  # not asked whether it is empty: an endless one has no length
    parts: list[Any] = [getattr(loader, "sampler", None) if sampler is None else sampler, loader.dataset]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
