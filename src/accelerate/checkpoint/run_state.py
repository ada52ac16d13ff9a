"""The state of a run: its objects, what a checkpoint gives them, random states, and rollback if a load fails."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.checkpoint import layout
from accelerate.checkpoint.parts import Part
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.devices import Device
from accelerate.errors import CheckpointError, in_words
from accelerate.io.host_memory import HostMemory, is_plain
from accelerate.io.safe_load import read_torch
from accelerate.random import global_states, set_global_states
from accelerate.torch_internals.modules import (
    FindHook,
    buffers_of,
    has_post_load_hooks,
    has_pre_load_hooks,
    loads_by_code_of,
    parameters_of,
)
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
    # The files of which it was seen already whether they can be loaded.
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
            f"{folder} was partly loaded before it failed ({in_words(error)}), and this engine cannot roll back: "
            "load another checkpoint before you continue training, or start again."
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


def read(run: Run, reader: CheckpointReader, **kwargs: Any) -> Loaded:
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
        set_global_states(_by_name(states or {}), random.Random(), np.random.RandomState(), torch.Generator())
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
        snapshot_object(item, undo)
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


# --- random states ----------------------------------------------------------------------------------------------

# Their keys in the file, as 1.x releases have them, by the name of the generator.
_KEYS = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}


def capture_random_states(device: Device | None = None) -> dict[str, Any]:
    """The random states of Python, NumPy, torch and the device."""
    states = {_KEYS[name]: state for name, state in global_states().items()}
    if device is not None and device.name != "cpu":
        states[device.rng_key] = device.stored_rng()
    return states


def restore_random_states(states: dict[str, Any], device: Device | None = None) -> None:
    set_global_states(_by_name(states))
    if device is not None and device.name != "cpu" and device.rng_key in states:
        device.restore_rng(states[device.rng_key])


def _by_name(states: dict[str, Any]) -> dict[str, Any]:
    return {name: states[key] for name, key in _KEYS.items() if key in states}


def derive_random_states(states: dict[str, Any], last: dict[str, Any], rank: int, device: Device | None = None) -> None:
    """Set random states for a rank that has none: derived from those of rank 0, and different on each rank.

    last: the states of the last rank that has some. If Python's or NumPy's state is the same there, it is the same on
    all ranks, as after `set_seed`, and is set here, too: samplers may shuffle with it, and all ranks need one order.
    """
    own, others = _by_name(states), _by_name(last)
    first = int(own["torch"].cpu().to(torch.int64).mul(torch.arange(1, own["torch"].numel() + 1)).sum())
    seed = int(np.random.SeedSequence([abs(first), rank]).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if device is not None:
        device.seed(seed)
    alike = [name for name in ("python", "numpy") if name in own and _same(own[name], others.get(name))]
    set_global_states({name: own[name] for name in alike})


def _same(state: Any, other: Any) -> bool:
    return pickle.dumps(state) == pickle.dumps(other)


# --- rollback ---------------------------------------------------------------------------------------------------


def overrides_load(model: nn.Module) -> bool:
    """Whether a model overrides `load_state_dict`."""
    return type(model).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(model)


def loads_by_own_code(model: nn.Module, names_fit: bool = True, except_for: FindHook | None = None) -> bool:
    """Whether a model runs code of its own when it loads, which may change the state or fail.

    Hooks (but those `except_for`), extra state and overridden methods are such code. names_fit: if the names in a
    checkpoint are those of the model, the code of torch's own modules does not count: it only translates older names.
    """
    own = nn.Module.set_extra_state
    return overrides_load(model) or any(
        has_post_load_hooks(part, except_for)
        or has_pre_load_hooks(part, except_for)
        or type(part).set_extra_state is not own
        or not _loads_as_torch(loads_by_code_of(part), names_fit)
        for part in model.modules()
    )


def _loads_as_torch(code: str, names_fit: bool) -> bool:
    return code == nn.Module.__module__ or (names_fit and code.startswith("torch.nn.modules."))


def snapshot_object(item: Any, undo: ExitStack) -> None:
    """Have `undo` restore the present state of an object."""
    with suppress(Exception):  # one that cannot say now what its state is has none to go back to
        undo.callback(_give_back, item, HostMemory().copy(item.state_dict()))


def _give_back(item: Any, state: Any) -> None:
    with suppress(Exception):  # what it has objected to is going to be raised
        item.load_state_dict(state)


def snapshot_optimizer(optimizer: Any, undo: ExitStack) -> None:
    """Have `undo` restore the groups and states of an optimizer: loading replaces them and changes no tensor."""
    for values in (*optimizer.param_groups, *optimizer.state.values()):
        undo.callback(values.update, dict(values))
    undo.callback(optimizer.__dict__.update, dict(optimizer.__dict__))


def snapshot_model(model: torch.nn.Module, undo: ExitStack) -> None:
    """Have `undo` restore the parameters and buffers of a model, from a copy of their values in host memory."""
    tables: list[MutableMapping[str, Any]] = [
        table for part in model.modules() for table in (parameters_of(part), buffers_of(part))
    ]
    before = [dict(table) for table in tables]
    tensors = {id(own): own for names in before for own in names.values() if _has_value(own)}
    values = HostMemory().copy(tensors)

    def put_back() -> None:
        for table, names in zip(tables, before, strict=True):
            for name in table.keys() - names.keys():
                del table[name]
            for name, own in names.items():
                table[name] = own
        for key, own in tensors.items():
            with torch.no_grad(), suppress(RuntimeError):  # what cannot be written to is as it was
                target = own.detach()
                if is_plain(target):
                    dense_view(target, own).copy_(dense_view(values[key], own))
                else:
                    target.copy_(values[key])

    undo.callback(put_back)


def _has_value(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not is_lazy(tensor) and not tensor.is_meta


def dense_view(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of a tensor without the dimensions that `like` has from `expand`: each memory location once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
