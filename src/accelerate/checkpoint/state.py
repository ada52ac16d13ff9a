"""What a checkpoint holds: the parts of a run, how each is written, and how each is read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import layout, rng
from accelerate.checkpoint.disk import Entry
from accelerate.checkpoint.files import read_safetensors, read_torch, read_weights, write_safetensors, write_torch
from accelerate.checkpoint.weights import with_tied
from accelerate.devices import Device
from accelerate.errors import CheckpointError
from accelerate.files import clean_state_dict_for_safetensors
from accelerate.unwrap import extract_model_from_parallel

# The name of a file, what goes into it, and whether as safetensors.
Part = tuple[str, Any, bool]


@dataclass
class Run:
    """The objects of one training, on one process."""

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
    # In the middle of a window: the gradients of this process, by parameter.
    gradients: dict[str, torch.Tensor] | None = None


def shared_parts(run: Run, weights: list[dict[str, Any]], safe: bool) -> Iterator[Part]:
    """What is the same on all processes."""
    for number, state in enumerate(weights):
        yield layout.model(number, safe), clean_state_dict_for_safetensors(state) if safe else state, safe
    for number, optimizer in enumerate(run.optimizers):
        yield layout.optimizer(number), optimizer.state_dict(), False
    for number, scheduler in enumerate(run.schedulers):
        yield layout.scheduler(number), scheduler.state_dict(), False
    for number, loader in enumerate(run.loaders):
        if getattr(loader, "use_stateful_dataloader", False):
            yield layout.stateful_loader(number), loader.state_dict(), False
    if run.scaler is not None:
        yield layout.scaler(), run.scaler.state_dict(), False
    for number, item in enumerate(run.custom):
        yield layout.custom(number), item.state_dict(), False


def own_parts(run: Run, step: int = 0) -> Iterator[Part]:
    """What each process has of its own. step: how far an accumulation was, as older releases note it."""
    yield layout.random_states(run.rank), {"step": step, **rng.capture(run.device)}, False
    if run.progress is not None:
        yield layout.progress(run.rank), run.progress, False
    if run.gradients is not None:
        yield layout.gradients(run.rank), run.gradients, True


def write_parts(parts: Iterable[Part], folder: Path) -> dict[str, Entry]:
    return {name: (write_safetensors if safe else write_torch)(content, folder / name) for name, content, safe in parts}


@dataclass
class Loaded:
    """Everything that was read for a run, checked against it, and not applied yet."""

    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    loaders: dict[int, Any]
    scaler: dict[str, Any] | None
    custom: list[Any]
    random_states: dict[str, Any] | None
    derived: bool
    progress: dict[str, Any] | None
    gradients: dict[str, torch.Tensor] | None
    strict: bool = True


def read(run: Run, folder: Path, saved_ranks: int, strict: bool = True, **kwargs: Any) -> Loaded:
    """Read a checkpoint and see that it fits. saved_ranks: how many processes wrote it."""
    models = [_read_model(folder, number) for number in range(len(run.models))]
    if strict:
        models = [_fitting(m, w, folder) for m, w in zip(run.models, models, strict=True)]
    # On its way to another device a file need not be in memory as a whole.
    mapped = {"mmap": run.device.name != "cpu"} | kwargs
    optimizers = [read_torch(folder / layout.optimizer(i), **mapped) for i in range(len(run.optimizers))]
    for number, (optimizer, state) in enumerate(zip(run.optimizers, optimizers, strict=True)):
        _check_groups(optimizer, state, folder / layout.optimizer(number))
    own = run.rank if (folder / layout.random_states(run.rank)).exists() else 0
    states = _if_there(folder / layout.random_states(own))
    progress = _if_there(folder / layout.progress(own))
    return Loaded(
        models,
        optimizers,
        [read_torch(folder / layout.scheduler(i), **kwargs) for i in range(len(run.schedulers))],
        {i: s for i in range(len(run.loaders)) if (s := _if_there(folder / layout.stateful_loader(i))) is not None},
        _if_there(folder / layout.scaler()) if run.scaler is not None else None,
        [read_torch(folder / layout.custom(i), **kwargs) for i in range(len(run.custom))],
        states,
        own != run.rank,
        progress,
        _read_gradients(run, folder, saved_ranks) if progress is not None and progress.get("gradients") else None,
        strict,
    )


def _if_there(path: Path) -> Any:
    return read_torch(path) if path.exists() else None


def _read_model(folder: Path, number: int) -> dict[str, Any]:
    safe = folder / layout.model(number, True)
    return read_weights(safe if safe.exists() else folder / layout.model(number, False))


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    plain: torch.nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return plain


def _fitting(model: torch.nn.Module, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The weights under the names of the model; raises before anything is copied where they are of another one."""
    model = _plain(model)
    weights = with_tied(model, weights)
    if any(part._load_state_dict_pre_hooks for part in model.modules()) or _loads_by_itself(model):
        return weights  # it renames or reshapes what it is given
    state = model.state_dict()
    missing, extra = sorted(state.keys() - weights.keys()), sorted(weights.keys() - state.keys())
    shapes = [
        f"{name} {tuple(weights[name].shape)} for {tuple(value.shape)}"
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name in weights and weights[name].shape != value.shape
    ]
    if missing or extra or shapes:
        raise CheckpointError(
            f"The weights in {folder} are not those of this {type(model).__name__}: missing {missing[:5]}, "
            f"unknown {extra[:5]}, other shapes {shapes[:5]}; create the model as it was when the checkpoint was saved."
        )
    return weights


def _loads_by_itself(model: torch.nn.Module) -> bool:
    return any(type(part).load_state_dict is not torch.nn.Module.load_state_dict for part in model.modules())


def _check_groups(optimizer: Any, state: dict[str, Any], path: Path) -> None:
    expected = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in state["param_groups"]]
    if expected != found:
        raise CheckpointError(
            f"{path} is of an optimizer with groups of {found} parameters, and this one has {expected}: "
            "create it as it was when the checkpoint was saved."
        )


def _read_gradients(run: Run, folder: Path, saved_ranks: int) -> dict[str, torch.Tensor]:
    """What this process had accumulated. On another number of processes each gets the mean: theirs is the same."""
    if saved_ranks == run.ranks:
        return read_safetensors(folder / layout.gradients(run.rank))
    everyone = [read_safetensors(folder / layout.gradients(rank)) for rank in range(saved_ranks)]
    names = {name for gradients in everyone for name in gradients}
    return {name: sum(g[name] for g in everyone if name in g) / saved_ranks for name in names}  # type: ignore[misc]


def _leave_file(optimizer: Any) -> None:
    """What stays on the host must not go on lying in the file: that may be deleted, or its disk taken away."""
    for values in optimizer.state.values():
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                values[name] = value.clone()


def apply(loaded: Loaded, run: Run) -> None:
    """Put what was read into the run. What may object comes first, while everything is still as it was."""
    for item, state in zip(run.custom, loaded.custom, strict=True):
        item.load_state_dict(state)
    for model, weights in zip(run.models, loaded.models, strict=True):
        _plain(model).load_state_dict(weights, strict=loaded.strict)
    for optimizer, state in zip(run.optimizers, loaded.optimizers, strict=True):
        optimizer.load_state_dict(state)
        if run.device.name != "cpu":
            _leave_file(optimizer)
    for scheduler, state in zip(run.schedulers, loaded.schedulers, strict=True):
        scheduler.load_state_dict(state)
    if run.scaler is not None and loaded.scaler is not None:
        run.scaler.load_state_dict(loaded.scaler)
    for number, state in loaded.loaders.items():
        if getattr(run.loaders[number], "use_stateful_dataloader", False):
            run.loaders[number].load_state_dict(state)
    if loaded.random_states is not None:
        if loaded.derived:
            rng.derive(loaded.random_states, run.rank, run.device)
        else:
            rng.restore(loaded.random_states, run.device)
