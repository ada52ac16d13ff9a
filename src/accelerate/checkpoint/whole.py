"""Models and optimizers that every process has as a whole: one file each, written by one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.files import read_safetensors, read_torch
from accelerate.checkpoint.named import names_of, numbered
from accelerate.checkpoint.parts import File
from accelerate.checkpoint.reading import CPU, Place, Places, Reader
from accelerate.checkpoint.sparse import unpacked
from accelerate.checkpoint.state import Run, named_parameters, plain
from accelerate.checkpoint.weights import with_tied
from accelerate.errors import CheckpointError
from accelerate.files import clean_state_dict_for_safetensors


def save(run: Run, weights: list[dict[str, Any]], *, safe: bool, main: bool) -> Iterator[File]:
    """main: whether this process writes what is the same on all of them."""
    if main:
        for number, state in enumerate(weights):
            content = clean_state_dict_for_safetensors(state) if safe else state
            yield File(layout.model(number, safe), content, safe)
        for number, optimizer in enumerate(run.optimizers):
            yield File(layout.optimizer(number), optimizer.state_dict())
    if run.gradients is not None:
        yield File(layout.gradients(run.rank), run.gradients, True)


def load(run: Run, reader: Reader, *, torch_load: dict[str, Any], **kwargs: Any) -> Callable[[], None]:
    """Read the files and see that they fit; returns the function that puts them into the run.

    torch_load: arguments for `torch.load`, which then reads by itself. kwargs: for the `load_state_dict` of models.
    """
    folder = reader.folder
    assign = kwargs.get("assign", False)
    models = [_read_model(model, reader, number, assign) for number, model in enumerate(run.without_hooks)]
    strict = kwargs.get("strict", True)
    models = [_fitting(m, w, folder, strict) for m, w in zip(run.without_hooks, models, strict=True)]
    optimizers = []
    for number, optimizer in enumerate(run.optimizers):
        name = layout.optimizer(number)
        if reader.has(layout.optimizer_shards(number)):
            state = {"state": {}, **_put_together(folder / layout.optimizer_shards(number))}
        else:
            state = (
                read_torch(reader.path(name), **torch_load)
                if torch_load
                else reader.content(name, _places_in(optimizer))
            )
        state = numbered(state, names_of(run.models, optimizer))  # as engines save that hold pieces
        _check_groups(optimizer, state, folder / name)
        optimizers.append(state)
    own, everyone = read_gradients(run, reader)

    def apply() -> None:
        reader.fill()
        for model, weights in zip(run.without_hooks, models, strict=True):
            plain(model).load_state_dict(weights, **kwargs)
        for optimizer, state in zip(run.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)
        for name, parameter in named_parameters(run.models).items():
            parameter.grad = added(own.get(name), everyone.get(name), parameter)

    return apply


def _read_model(model: torch.nn.Module, reader: Reader, number: int, assign: bool) -> dict[str, Any]:
    if reader.has(layout.model_shards(number)):
        return _put_together(reader.folder / layout.model_shards(number))
    names = [layout.model(number, True), layout.gathered_model(number), layout.model(number, False)]
    name = next(filter(reader.has, names), names[0])
    model = plain(model)
    places: dict[str, Place] = {
        key: value.device for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }
    if not assign and not _changes_what_it_loads(model):
        own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        places |= {key: value for key, value in own if places.get(key) == CPU == value.device}
    return reader.weights(name, places)


def _places_in(optimizer: Any) -> Places:
    """Where the state of each parameter goes when an optimizer loads it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    inner = getattr(optimizer, "optimizer", optimizer)
    # Others make something of what they load, and may need for it what is there.
    keeps = type(inner).load_state_dict is torch.optim.Optimizer.load_state_dict
    keeps = keeps and not inner._optimizer_load_state_dict_pre_hooks

    def place(keys: tuple[Any, ...]) -> Place:
        # Counts of steps may stay on the host: torch knows.
        if len(keys) != 3 or keys[0] != "state" or keys[2] == "step" or not isinstance(keys[1], int):
            return CPU
        if keys[1] >= len(parameters):
            return CPU
        parameter: torch.Tensor = parameters[keys[1]]
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device
        state = inner.state.get(parameter) if keeps else None
        there = state.get(keys[2]) if isinstance(state, dict) else None
        return there if isinstance(there, torch.Tensor) and there.device == CPU else CPU

    return place


def _fitting(model: torch.nn.Module, weights: dict[str, Any], folder: Path, strict: bool) -> dict[str, Any]:
    """The weights under the names of the model; raises before anything is copied where they are of another one.

    strict: whether all names have to be the same; shapes have to be in any case.
    """
    model = plain(model)
    weights = with_tied(model, weights)
    if any(part._load_state_dict_pre_hooks for part in model.modules()) or _loads_by_itself(model):
        return weights  # it renames or reshapes what it is given
    state = model.state_dict()
    missing, extra = sorted(state.keys() - weights.keys()), sorted(weights.keys() - state.keys())
    if not strict:
        missing, extra = [], []
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


def _changes_what_it_loads(model: torch.nn.Module) -> bool:
    """Whether a model may make something else of what it is given than to copy it."""
    own = any(not part._load_from_state_dict.__module__.startswith("torch.nn.modules.") for part in model.modules())
    return own or _loads_by_itself(model) or any(part._load_state_dict_pre_hooks for part in model.modules())


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


Gradients = dict[str, torch.Tensor]


def read_gradients(run: Run, reader: Reader, alike: bool = False) -> tuple[Gradients, Gradients]:
    """What this process had accumulated by itself, and what is the same for all: exchanged already, or a mean.

    On another number of processes each gets the mean; theirs is the same. alike: so it is here.
    """
    shards = layout.gradient_shards()
    everyone: Gradients = _put_together(reader.folder / shards) if reader.has(shards) else {}
    if run.saved_ranks == run.ranks and not alike:
        own = layout.gradients(run.rank)
        return unpacked(read_safetensors(reader.path(own))) if reader.has(own) else {}, everyone
    files = [layout.gradients(rank) for rank in range(run.saved_ranks)]
    saved = [unpacked(read_safetensors(reader.path(file))) for file in files if reader.has(file)]
    for name in {name for gradients in saved for name in gradients}:
        mean = reduce(torch.add, (gradients[name] for gradients in saved if name in gradients)) / run.saved_ranks
        everyone[name] = mean + everyone[name] if name in everyone else mean
    return {}, everyone


def added(one: torch.Tensor | None, other: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Both gradients together, as the parameter is; None where there is none."""
    found = [
        gradient.to(parameter.device, parameter.dtype, copy=True) for gradient in (one, other) if gradient is not None
    ]
    return sum(found[1:], found[0]) if found else None


def _put_together(folder: Path) -> dict[str, Any]:
    """All of what several processes wrote in shards."""
    from accelerate.checkpoint import shards  # brings in torch.distributed.checkpoint, which few runs need

    return shards.read(folder, shards.whole)
