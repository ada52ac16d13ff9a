"""Models and optimizers that every process has as a whole: one file each, written by one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.files import read_safetensors, read_torch
from accelerate.checkpoint.kept import keep_model, keep_optimizer, once
from accelerate.checkpoint.named import names_of, numbered
from accelerate.checkpoint.parts import File, Put
from accelerate.checkpoint.reading import CPU, Place, Places, Reader
from accelerate.checkpoint.sparse import unpacked
from accelerate.checkpoint.state import Run, fill, in_words, named_parameters, plain
from accelerate.checkpoint.weights import with_tied
from accelerate.devices import Device
from accelerate.errors import CheckpointError
from accelerate.files import each_once
from accelerate.torch_internals.modules import has_post_load_hooks, has_pre_load_hooks, load_state, loads_by_code_of
from accelerate.torch_internals.optimizers import has_load_hooks


def save(run: Run, weights: list[dict[str, Any]], *, safe: bool, main: bool) -> Iterator[File]:
    """main: whether this process writes what is the same on all of them."""
    storable = run.device.storable
    if main:
        for number, state in enumerate(map(storable, weights)):
            yield File(layout.model(number, safe), each_once(state) if safe else state, safe)
        for number, optimizer in enumerate(run.optimizers):
            yield File(layout.optimizer(number), storable(optimizer.state_dict()), together=True)
    if run.gradients is not None:
        yield File(layout.gradients(run.rank), storable(run.gradients), True)


def load(run: Run, reader: Reader, *, torch_load: dict[str, Any], **kwargs: Any) -> Put:
    """Read the files and see that they fit; returns what puts them into the run.

    torch_load: arguments for `torch.load`, which then reads by itself. kwargs: for the `load_state_dict` of models.
    """
    folder = reader.folder
    if kwargs.keys() - {"strict", "assign"}:
        _check_keywords(run.models, kwargs)
    assign, strict = kwargs.get("assign", False), kwargs.get("strict", True)
    # Found out now, for a hook may remove itself. An optimizer comes after the weights, which go back if it objects.
    own_optimizers = [not _loads_as_torch(_inner(optimizer)) for optimizer in run.optimizers]
    before_own = not all(_loads_as_torch(_inner(optimizer)) for optimizer in run.to_follow or run.optimizers)
    models = [(m := plain(model), before_own or _has_own_code(m)) for model in run.without_hooks]
    puts = []
    for number, (model, own) in enumerate(models):
        weights = _read_model(model, run.device, reader, number, in_place=not (assign or own))
        weights = _fitting(model, weights, folder, strict)
        expanded = [] if assign or _has_own_code(model) else list(_expanded(model, weights, folder))
        into = model.load_state_dict if _has_own_code(model) else partial(load_state, model)
        puts.append(partial(_load_model, model, into, weights, expanded, folder, kwargs))
    optimizers = []
    for number, optimizer in enumerate(run.optimizers):
        name = layout.optimizer(number)
        if reader.has(layout.optimizer_shards(number)):
            state = {"state": {}, **_put_together(folder / layout.optimizer_shards(number))}
        else:
            state = (
                read_torch(reader.path(name), **torch_load)
                if torch_load
                else reader.content(name, _places_in(optimizer, run.device))
            )
        state = numbered(state, names_of(run.models, optimizer))  # as engines save that hold pieces
        _check_groups(optimizer, state, folder / name)
        if _loads_as_torch(_inner(optimizer)):
            state = _quick_to_search(state)
        optimizers.append(partial(fill, optimizer, state, name, _inner(optimizer)))
    gradients, everyone = read_gradients(run, reader)

    def first(undo: ExitStack) -> None:
        reader.bring_in()
        for (model, own), put in zip(models, puts, strict=True):
            if own:
                keep_model(model, undo)
                put()
        for optimizer, own, put in zip(run.optimizers, own_optimizers, optimizers, strict=True):
            if own:
                keep_optimizer(optimizer, undo)
                put()

    def rest() -> None:
        reader.fill()
        for (_, own), put in zip(models, puts, strict=True):
            if not own:
                put()
        for own, put in zip(own_optimizers, optimizers, strict=True):
            if not own:
                put()
        for name, parameter in named_parameters(run.models).items():
            parameter.grad = added(gradients.get(name), everyone.get(name), parameter)

    return Put(rest, first)


def _check_keywords(models: list[torch.nn.Module], kwargs: dict[str, Any]) -> None:
    for model in map(plain, models):
        try:
            inspect.signature(model.load_state_dict).bind({}, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"load_state was given {', '.join(kwargs)}, and the load_state_dict of {type(model).__name__} {error}: "
                "leave that out."
            ) from None


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _read_model(model: torch.nn.Module, device: Device, reader: Reader, number: int, in_place: bool) -> dict[str, Any]:
    if reader.has(layout.model_shards(number)):
        return _put_together(reader.folder / layout.model_shards(number))
    names = [layout.model(number, True), layout.gathered_model(number), layout.model(number, False)]
    name = next(filter(reader.has, names), names[0])
    places: dict[str, Place] = {
        key: value.device if device.addressable else CPU
        for key, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    if in_place:
        own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        places |= {key: value for key, value in own if places.get(key) == CPU == value.device}
    return reader.weights(name, places)


def _places_in(optimizer: Any, device: Device) -> Places:
    """Where the state of each parameter goes when an optimizer loads it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    inner = _inner(optimizer)
    keeps = _loads_as_torch(inner)

    def place(keys: tuple[Any, ...]) -> Place:
        # Counts of steps may stay on the host: torch knows.
        if len(keys) != 3 or keys[0] != "state" or keys[2] == "step" or not isinstance(keys[1], int):
            return CPU
        if keys[1] >= len(parameters):
            return CPU
        parameter: torch.Tensor = parameters[keys[1]]
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device if device.addressable else CPU
        state = inner.state.get(parameter) if keeps else None
        there = state.get(keys[2]) if isinstance(state, dict) else None
        return there if isinstance(there, torch.Tensor) and there.device == CPU else CPU

    return place


def _fitting(model: torch.nn.Module, weights: dict[str, Any], folder: Path, strict: bool) -> dict[str, Any]:
    """The weights under the names of the model; raises before anything is copied where they are of another one.

    strict: whether all names have to be the same; shapes have to be in any case.
    """
    weights = with_tied(model, weights)
    if any(map(has_pre_load_hooks, model.modules())) or _loads_by_itself(model):
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


def _expanded(
    model: torch.nn.Module, weights: dict[str, Any], folder: Path
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For tensors made with `expand`, which torch refuses to copy to: the memory behind each, and its new content."""
    own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in own:
        value = weights.get(name)
        if tensor.layout != torch.strided or once(tensor, tensor) is tensor or not isinstance(value, torch.Tensor):
            continue
        part = once(value, tensor)
        if not torch.equal(part.expand_as(value), value):
            raise CheckpointError(
                f"{name} of this {type(model).__name__} was made with `expand`, so that several of its values are "
                f"one, and those in {folder} differ: give it memory of its own (`.clone()`)."
            )
        weights[name] = tensor
        yield once(tensor, tensor), part


def _load_model(
    model: torch.nn.Module,
    into: Callable[..., Any],
    weights: dict[str, Any],
    expanded: list[tuple[torch.Tensor, torch.Tensor]],
    folder: Path,
    kwargs: dict[str, Any],
) -> None:
    with torch.no_grad():
        for memory, value in expanded:
            memory.copy_(value)
    try:
        into(weights, **kwargs)
    except Exception as error:
        raise CheckpointError(
            f"This {type(model).__name__} has not taken the weights in {folder} ({in_words(error)}): create it as it "
            "was when the checkpoint was saved."
        ) from error


def _has_own_code(model: torch.nn.Module) -> bool:
    """Whether a model may make something else of what it is given than to copy it, and may object to it."""
    return _loads_by_itself(model) or any(map(_is_of_its_own, model.modules()))


def _is_of_its_own(part: torch.nn.Module) -> bool:
    return (
        has_pre_load_hooks(part)
        or has_post_load_hooks(part)
        or not loads_by_code_of(part).startswith("torch.nn.modules.")
        or type(part).set_extra_state is not torch.nn.Module.set_extra_state
    )


def _loads_by_itself(model: torch.nn.Module) -> bool:
    own = torch.nn.Module.load_state_dict
    return any(type(part).load_state_dict is not own or "load_state_dict" in vars(part) for part in model.modules())


def _loads_as_torch(optimizer: Any) -> bool:
    """Whether an optimizer takes what it is given; others make something of it, for which they may need what is there,
    and may object."""
    return (
        type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        and type(optimizer).__setstate__.__module__.startswith("torch.optim.")
        and not has_load_hooks(optimizer)
    )


def _check_groups(optimizer: Any, state: dict[str, Any], path: Path) -> None:
    inner = _inner(optimizer)
    expected = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in state["param_groups"]]
    if expected != found:
        raise CheckpointError(
            f"{path} is of an optimizer with groups of {found} parameters, and this one has {expected}: "
            "create it as it was when the checkpoint was saved."
        )
    lacking = _lacking(inner, state["param_groups"]) if _loads_as_torch(inner) else []
    if lacking:
        raise CheckpointError(
            f"{path} is of another kind of optimizer than {type(inner).__name__}: it knows nothing of "
            f"{', '.join(lacking)}; create the optimizer as it was when the checkpoint was saved."
        )


def _lacking(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[str]:
    """The settings that an optimizer would miss with these groups, without those that it adds to older ones itself."""
    twin = object.__new__(type(optimizer))
    try:
        twin.__setstate__({"defaults": optimizer.defaults, "state": {}, "param_groups": [dict(g) for g in groups]})
    except Exception:  # it needs more than that to tell
        return []
    return sorted({name for group in twin.param_groups for name in optimizer.defaults.keys() - group.keys()})


def _quick_to_search(state: dict[str, Any]) -> dict[str, Any]:
    """For each tensor torch looks for the number of its parameter in the groups: in a dict, not through a list."""
    groups = [{**group, "params": dict.fromkeys(group["params"])} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


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
