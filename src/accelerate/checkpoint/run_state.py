"""The state of a run: its objects, and what a checkpoint gives them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.parts import Part
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.rollback import restore_object
from accelerate.devices import Device
from accelerate.errors import CheckpointError, in_words
from accelerate.io.safe_load import read_torch
from accelerate.random import derive_random_states, restore_random_states, set_global_states, states_by_name
from accelerate.unwrap import unwrapped

# Beside the random states of a process, in a file that the 1.x releases know: they take from it what they know.
PROGRESS = "progress"


class LocalRank(NamedTuple):
    """Which of how many processes of its machine this one is."""

    rank: int = 0
    size: int = 1


@dataclass
class Run:
    """The objects of one training run, on one rank: models as prepared, optimizers and schedulers as the script made
    them."""

    rank: int
    ranks: int
    device: Device
    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)
    scaler: Any = None
    progress: dict[str, Any] | None = None
    # In the middle of a window: the gradients of this process, by parameter (see `named_parameters`). None outside an
    # accumulation window. Engines that keep gradients elsewhere (`Sharded`, DeepSpeed) collect them themselves and only
    # ask whether this is None.
    gradients: dict[str, torch.Tensor] | None = None
    # The files that were checked already for what cannot be loaded.
    looked_at: set[str] = field(default_factory=set)
    local: LocalRank = field(default_factory=LocalRank)
    # When loading: how many processes wrote the checkpoint, and what is loaded at a time, for a hook may come between
    # optimizers and models, and load some of the models itself.
    saved_ranks: int = 0
    models_to_load: list[torch.nn.Module] = field(default_factory=list)
    optimizers_to_load: list[Any] = field(default_factory=list)


def named_parameters(models: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter once, under the number of its model and its name."""
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for number, model in enumerate(models):
        for name, parameter in unwrapped(model).named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[f"{number}.{name}"] = parameter
    return named


class StateIO(Protocol):
    """How models and optimizers are saved and loaded: what a checkpoint needs of a `Strategy`."""

    def weights(self, models: list[torch.nn.Module]) -> list[dict[str, Any]]:
        """The weights of models, for hooks and for `save`."""

    def save(self, run: Any, weights: list[dict[str, Any]], *, safe: bool, main: bool, **kwargs: Any) -> Iterable[Part]:
        """The parts of models, optimizers and gradients that this rank writes."""

    def load(self, run: Any, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        """Read and check all of it. Returns what applies it to the run."""


def _nothing(undo: ExitStack) -> None: ...


@dataclass
class StagedLoad:
    """State that was read for models and optimizers, and not applied yet.

    apply_fallible: called first, for objects that load by code of their own, which may fail. It registers with `undo`
    what restores their present state. apply_in_place: everything else, once nothing has failed on any rank.
    """

    apply_in_place: Callable[[], None]
    apply_fallible: Callable[[ExitStack], None] = _nothing


@contextmanager
def past_undoing(folder: Path) -> Iterator[None]:
    """A context in which a run is changed for good: what fails here leaves it partly loaded."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{folder} was partly loaded before it failed ({in_words(error)}), and what was loaded cannot be "
            "rolled back: load another checkpoint before you continue training, or start again."
        ) from error


@dataclass
class Loaded:
    """Everything that was read for a run but models and optimizers, and not applied yet.

    derived: if this rank has no random states and got those of rank 0, the states of the last rank that has some.
    """

    schedulers: list[dict[str, Any]]
    loaders: dict[int, Any]
    scaler: dict[str, Any] | None
    custom: list[Any]
    random_states: dict[str, Any] | None
    derived: dict[str, Any] | None
    progress: dict[str, Any] | None


def read_objects(run: Run, reader: CheckpointReader, **kwargs: Any) -> Loaded:
    """Read everything that the checkpoint has. kwargs: for `torch.load`."""

    def there(name: str) -> Any:
        return read_torch(reader.path(name), **kwargs) if reader.has(name) else None

    own = run.rank if reader.has(layout.random_states(run.rank)) else 0
    others = range(run.rank) if own != run.rank else ()
    saved = [name for name in map(layout.random_states, others) if reader.has(name)]
    states = _random_states(there(layout.random_states(own)), reader.folder / layout.random_states(own))
    return Loaded(
        [read_torch(reader.path(layout.scheduler(i)), **kwargs) for i in range(len(run.schedulers))],
        {i: s for i in range(len(run.loaders)) if (s := there(layout.stateful_loader(i))) is not None},
        there(layout.scaler()) if run.scaler is not None else None,
        [read_torch(reader.path(layout.custom(i)), **kwargs) for i in range(len(run.custom))],
        states,
        there(saved[-1]) if saved else None,
        # By itself, as the first versions of this format had it, and where it holds what 1.x would refuse.
        states[PROGRESS] if states is not None and PROGRESS in states else there(layout.progress(own)),
    )


def _random_states(states: Any, path: Path) -> Any:
    try:
        # Into others, which changes none of the run. The state of the device is not tried.
        set_global_states(states_by_name(states or {}), random.Random(), np.random.RandomState(), torch.Generator())
    except Exception as error:
        raise CheckpointError(
            f"{path} does not contain random states ({type(error).__name__}: {error}): load another checkpoint."
        ) from error
    return states


def apply_objects(loaded: Loaded, run: Run, undo: ExitStack) -> None:
    """Load what was read into the objects of a run, the script's own objects first.

    All of them come before the models, so that one may fail while the weights are unchanged. `undo` gets what restores
    their present state.
    """
    for item in (*run.custom, *run.schedulers, *([] if run.scaler is None else [run.scaler])):
        restore_object(item, undo)
    for number, (item, state) in enumerate(zip(run.custom, loaded.custom, strict=True)):
        load_into(item, state, layout.custom(number))
    for number, (scheduler, state) in enumerate(zip(run.schedulers, loaded.schedulers, strict=True)):
        load_into(scheduler, state, layout.scheduler(number))
    if run.scaler is not None and loaded.scaler is not None:
        load_into(run.scaler, loaded.scaler, layout.scaler())


def load_into(item: Any, state: Any, name: str) -> None:
    """Load a state into an object. name: the file it is from."""
    with fitting(item, name):
        item.load_state_dict(state)


@contextmanager
def fitting(item: Any, name: str) -> Iterator[None]:
    """A context in which an object loads its state: an error becomes one of the checkpoint."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{name} does not fit the {type(item).__name__} that it is loaded into ({in_words(error)}): pass the same "
            "objects, in the same order, as when it was saved."
        ) from error


def apply_random_states(loaded: Loaded, run: Run) -> None:
    """Restore the random states. This comes last, so that nothing is drawn from them meanwhile."""
    if loaded.random_states is not None:
        if loaded.derived is not None:
            derive_random_states(loaded.random_states, loaded.derived, run.rank, run.device)
        else:
            restore_random_states(loaded.random_states, run.device)
