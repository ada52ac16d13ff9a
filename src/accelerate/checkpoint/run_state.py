"""Everything in a checkpoint but models and optimizers: schedulers, loaders, custom objects, random states."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.parts import File, snapshot_object
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.devices import Device
from accelerate.errors import CheckpointError, in_words
from accelerate.io.safe_load import read_torch
from accelerate.io.torch_format import refused
from accelerate.unwrap import unwrapped

logger = logging.getLogger(__name__)

# Beside the random states of a process, in a file that the 1.x releases know: they take from it what they know.
_PROGRESS = "progress"


@dataclass
class Run:
    """The objects of one training run, on one rank."""

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
    # In the middle of a window: the gradients of this process, by parameter (see `named_parameters`).
    gradients: dict[str, torch.Tensor] | None = None
    # The files of which it was seen already whether they can be loaded.
    looked_at: set[str] = field(default_factory=set)
    # Which of how many processes of its machine this one is.
    local: tuple[int, int] = (0, 1)
    # When loading: how many processes wrote the checkpoint, and the models whose weights are not left to a hook.
    saved_ranks: int = 0
    models_to_load: list[torch.nn.Module] = field(default_factory=list)
    exact_resume: bool = False  # whether loaders start where they were
    optimizers_after_models: list[Any] = field(default_factory=list)  # the optimizers that load after these weights


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


def shared_parts(run: Run, main: bool) -> Iterator[File]:
    """The parts that are the same on all ranks. main: whether this rank writes them."""
    # Objects of the script's own are asked on all processes, since they may have to ask each other.
    for number, item in enumerate(run.custom):
        file = File(layout.custom(number), item.state_dict())
        if main:
            _look_at(file, item, run.looked_at)
            yield file
    if not main:
        return
    for number, scheduler in enumerate(run.schedulers):
        file = File(layout.scheduler(number), scheduler.state_dict())
        _look_at(file, getattr(scheduler, "scheduler", scheduler), run.looked_at)
        yield file
    for number, loader in enumerate(run.loaders):
        if getattr(loader, "use_stateful_dataloader", False):
            yield File(layout.stateful_loader(number), loader.state_dict())
    if run.scaler is not None:
        yield File(layout.scaler(), run.scaler.state_dict())


def _look_at(file: File, item: Any, looked_at: set[str]) -> None:
    """Warn once for an object whose state can be saved but not loaded."""
    if file.name in looked_at:
        return
    looked_at.add(file.name)
    if (kind := refused(file.content)) is not None:
        logger.warning(
            f"{file.name}: the state of {type(item).__name__} holds {kind}, which load_state will refuse, since "
            "it runs no code from files: have `state_dict` return tensors and plain values, call "
            "`torch.serialization.add_safe_globals` with the class before it is loaded, or load it with "
            "`load_kwargs={'weights_only': False}`."
        )


def own_parts(run: Run, step: int = 0) -> Iterator[File]:
    """The parts of this rank alone: one file, since there may be thousands of ranks.

    The progress gets a second file if it contains what 1.x releases refuse, since they would refuse the whole file.
    step: the accumulation step, as older releases store it.
    """
    together = run.progress is not None and _is_known_to_1_x(run.progress)
    progress = {_PROGRESS: run.progress} if together else {}
    yield File(layout.random_states(run.rank), {"step": step, **capture_random_states(run.device), **progress})
    if run.progress is not None and not together:
        yield File(layout.progress(run.rank), run.progress)


_PLAIN = {type(None), bool, int, float, str, bytes, torch.Tensor}


def _is_known_to_1_x(value: Any) -> bool:
    """Whether 1.x releases can read this: tensors, plain values, and arrays as in NumPy's random states."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is dict:
        return all(map(_is_known_to_1_x, value)) and all(map(_is_known_to_1_x, value.values()))
    if kind in (list, tuple):
        return all(map(_is_known_to_1_x, value))
    return kind is np.ndarray and value.dtype == np.uint32


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
        states[_PROGRESS] if states is not None and _PROGRESS in states else there(layout.progress(own)),
    )


def _random_states(states: Any, path: Path) -> Any:
    try:
        check_random_states(states or {})
    except Exception as error:
        raise CheckpointError(
            f"{path} holds no random states ({type(error).__name__}: {error}): load another checkpoint."
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
        load_into(scheduler, state, layout.scheduler(number), getattr(scheduler, "scheduler", None))
    if run.scaler is not None and loaded.scaler is not None:
        load_into(run.scaler, loaded.scaler, layout.scaler())


def load_into(item: Any, state: Any, name: str, inner: Any = None) -> None:
    """Load a state into an object. name: the file it is from. inner: the object inside a wrapper."""
    try:
        item.load_state_dict(state)
    except Exception as error:
        kind = type(item if inner is None else inner).__name__
        raise CheckpointError(
            f"{name} does not fit the {kind} that it is loaded into ({in_words(error)}): give the same "
            "objects, in the same order, as when it was saved."
        ) from error


def apply_random_states(loaded: Loaded, run: Run) -> None:
    """Restore the random states. This comes last, so that nothing is drawn from them meanwhile."""
    if loaded.random_states is not None:
        if loaded.derived is not None:
            derive_random_states(loaded.random_states, loaded.derived, run.rank, run.device)
        else:
            restore_random_states(loaded.random_states, run.device)


_PYTHON, _NUMPY, _TORCH = "random_state", "numpy_random_seed", "torch_manual_seed"


def capture_random_states(device: Device | None = None) -> dict[str, Any]:
    """The random states of Python, NumPy, torch and the device."""
    states: dict[str, Any] = {
        _PYTHON: random.getstate(),
        _NUMPY: np.random.get_state(),
        _TORCH: torch.get_rng_state(),
    }
    if device is not None and device.name != "cpu":
        states[device.rng_key] = device.stored_rng()
    return states


def check_random_states(states: dict[str, Any]) -> None:
    """Raise if states cannot be restored, without changing any. The state of the device is not tried."""
    _restore_into(states, random.Random(), np.random.RandomState(), torch.Generator())


def _restore_into(states: dict[str, Any], python: Any, numpy: Any, generator: torch.Generator) -> None:
    if _PYTHON in states:
        version, internal, gauss = states[_PYTHON]
        python.setstate((version, tuple(internal), gauss))
    if _NUMPY in states:
        numpy.set_state(states[_NUMPY])
    if _TORCH in states:
        generator.set_state(states[_TORCH].cpu())


def restore_random_states(states: dict[str, Any], device: Device | None = None) -> None:
    _restore_into(states, random, np.random, torch.default_generator)
    if device is not None and device.rng_key in states:
        device.restore_rng(states[device.rng_key])


def derive_random_states(states: dict[str, Any], last: dict[str, Any], rank: int, device: Device | None = None) -> None:
    """Set random states for a rank that has none: derived from those of rank 0, and different on each rank.

    last: the states of the last rank that has some. If Python's or NumPy's state is the same there, it is the same on
    all ranks, as after `set_seed`, and is set here, too: samplers may shuffle with it, and all ranks need one order.
    """
    first = int(states[_TORCH].cpu().to(torch.int64).mul(torch.arange(1, states[_TORCH].numel() + 1)).sum())
    seed = int(np.random.SeedSequence([abs(first), rank]).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if device is not None:
        device.seed(seed)
    shared = {
        name: states[name]
        for name in (_PYTHON, _NUMPY)
        if name in states and pickle.dumps(states[name]) == pickle.dumps(last.get(name))
    }
    _restore_into(shared, random, np.random, torch.default_generator)
