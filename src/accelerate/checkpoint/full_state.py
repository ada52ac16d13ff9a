"""Full state dicts of models and optimizers, written by rank 0, one file each; and gradients inside a window."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.parts import File
from accelerate.checkpoint.reader import CPU, CheckpointReader, Destination, FindDestination
from accelerate.checkpoint.rollback import (
    dense_view,
    loads_by_own_code,
    overrides_load,
    restore_model,
    restore_optimizer,
)
from accelerate.checkpoint.run_state import Run, StagedLoad, load_into, named_parameters
from accelerate.devices import Device
from accelerate.errors import CheckpointError, in_words
from accelerate.io.safe_load import read_torch
from accelerate.io.stored_tensors import each_once, read_safetensors, view_of
from accelerate.text import differences
from accelerate.torch_internals.modules import has_pre_load_hooks, load_state
from accelerate.torch_internals.optimizers import has_load_hooks
from accelerate.torch_internals.tensors import sparse_parts
from accelerate.unwrap import unwrapped


def save(run: Run, weights: list[dict[str, Any]], *, safe: bool, main: bool) -> Iterator[File]:
    """The files of models, optimizers and gradients. main: whether this rank writes what all ranks share."""
    storable = run.device.storable
    if main:
        for number, state in enumerate(map(storable, weights)):
            yield File(layout.model(number, safe), each_once(state) if safe else state, safe)
        for number, optimizer in enumerate(run.optimizers):
            yield File(layout.optimizer(number), storable(optimizer.state_dict()), pools_small_tensors=True)
    if run.gradients is not None:
        yield File(layout.gradients(run.rank), storable(run.gradients), True)


def load(run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
    """Read the files and check that they fit. Returns what applies them to the run.

    run: its `models_to_load` are unwrapped. torch_load: arguments for `torch.load`, which then reads the files.
    kwargs: for the models' `load_state_dict`.
    """
    if kwargs.keys() - {"strict", "assign"}:
        _check_keywords(run.models, kwargs)
    targets = [*_models(run, reader, kwargs), *_optimizers(run, reader, torch_load)]
    gradients, everyone = read_gradients(run, reader)

    def apply_fallible(undo: ExitStack) -> None:
        reader.bring_in()
        for target in targets:
            if target.restore is not None:
                target.restore(undo)
                target.apply()

    def apply_in_place() -> None:
        reader.fill()
        for target in targets:
            if target.restore is None:
                target.apply()
        for name, parameter in named_parameters(run.models).items():
            parameter.grad = added(gradients.get(name), everyone.get(name), parameter)

    return StagedLoad(apply_in_place, apply_fallible)


@dataclass
class _Target:
    """A model or an optimizer, with the state that was read for it.

    restore: if loading may fail halfway, has `undo` restore its present state.
    """

    apply: Callable[[], None]
    restore: Callable[[ExitStack], None] | None


def _models(run: Run, reader: CheckpointReader, kwargs: dict[str, Any]) -> Iterator[_Target]:
    assign, strict = kwargs.get("assign", False), kwargs.get("strict", True)
    # An optimizer comes after the weights, which go back if it objects.
    fallible = not all(map(loads_as_torch, run.optimizers))
    for number, model in enumerate(run.models_to_load):
        own_code = loads_by_own_code(model)
        in_place = not (assign or own_code or fallible)
        weights = _read_model(model, run.device, reader, number, in_place)
        weights = _fitting(model, weights, reader.folder, strict)
        expanded = [] if assign or own_code else list(_expanded(model, weights, reader.folder))
        into = model.load_state_dict if own_code else partial(load_state, model)
        yield _Target(
            partial(_load_model, model, into, weights, expanded, reader.folder, kwargs),
            partial(restore_model, model) if own_code or fallible else None,
        )


def _optimizers(run: Run, reader: CheckpointReader, torch_load: dict[str, Any]) -> Iterator[_Target]:
    for number, optimizer in enumerate(run.optimizers_to_load):
        name = layout.optimizer(number)
        as_torch = loads_as_torch(optimizer)  # found out now, for a hook may remove itself
        if reader.has(layout.optimizer_shards(number)):
            state = {"state": {}, **read_full(reader.folder / layout.optimizer_shards(number))}
        elif torch_load:
            state = read_torch(reader.path(name), **torch_load)
        else:
            state = reader.content(name, _places_in(optimizer, run.device, as_torch))
        _check_form(state, as_torch, reader.folder / name)
        state = each_its_own(state)
        state = to_indices(state, parameter_names(run.models, optimizer))  # as engines save that hold shards
        _check_groups(optimizer, state, reader.folder / name)
        if as_torch:
            check_kind(optimizer, state["param_groups"], reader.folder / name)
            state = _quick_to_search(state)
        yield _Target(
            partial(load_into, optimizer, state, name),
            None if as_torch else partial(restore_optimizer, optimizer),
        )


def _check_keywords(models: list[torch.nn.Module], kwargs: dict[str, Any]) -> None:
    for model in map(unwrapped, models):
        try:
            inspect.signature(model.load_state_dict).bind({}, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"load_state was given {', '.join(kwargs)}, but the load_state_dict of {type(model).__name__} {error}: "
                "leave it out."
            ) from None


def _read_model(
    model: torch.nn.Module, device: Device, reader: CheckpointReader, number: int, in_place: bool
) -> dict[str, Any]:
    if reader.has(layout.model_shards(number)):
        return read_full(reader.folder / layout.model_shards(number))
    names = [layout.model(number, True), layout.gathered_model(number), layout.model(number, False)]
    name = next(filter(reader.has, names), names[0])
    places: dict[str, Destination] = {
        key: value.device if device.addressable else CPU
        for key, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    if in_place:
        own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        places |= {key: value for key, value in own if places.get(key) == CPU == value.device}
    return reader.weights(name, places)


def _places_in(optimizer: Any, device: Device, as_torch: bool) -> FindDestination:
    """The destination of each tensor in the state of an optimizer. as_torch: whether it loads as torch does."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def place(keys: tuple[Any, ...]) -> Destination:
        # Counts of steps may stay on the host: torch knows.
        if len(keys) != 3 or keys[0] != "state" or keys[2] == "step" or not isinstance(keys[1], int):
            return CPU
        if keys[1] >= len(parameters):
            return CPU
        parameter: torch.Tensor = parameters[keys[1]]
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device if device.addressable else CPU
        state = optimizer.state.get(parameter) if as_torch else None
        there = state.get(keys[2]) if isinstance(state, dict) else None
        return there if isinstance(there, torch.Tensor) and there.device == CPU else CPU

    return place


def _fitting(model: torch.nn.Module, weights: dict[str, Any], folder: Path, strict: bool) -> dict[str, Any]:
    """The weights under the names of the model. Raises if they are of another model, before anything is copied."""
    weights = with_tied(model, weights)
    if not any(map(has_pre_load_hooks, model.modules())) and not overrides_load(model):  # else it changes what it gets
        check_fit(model, model.state_dict(), weights, folder, strict)
    return weights


def with_tied(model: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """The weights with all names of tied tensors, which were stored under one of them."""
    state = model.state_dict()
    missing = {name: view for name, value in state.items() if name not in weights and (view := view_of(value))}
    if not missing:
        return weights
    homes = {view_of(value): name for name, value in state.items() if name in weights}
    tied = {name: weights[homes[view]] for name, view in missing.items() if view in homes}
    return {**weights, **tied}


def check_fit(
    model: torch.nn.Module, own: dict[str, Any], found: dict[str, Any], folder: Path, strict: bool = True
) -> None:
    """Raise if the weights in a folder are not of this model. own: its state dict, or this rank's part of it.

    strict: whether the names have to match. Shapes always have to.
    """
    missing, extra = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    if not strict:
        missing, extra = [], []
    shapes = [
        f"{name} {tuple(found[name].shape)} for {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and name in found and found[name].shape != value.shape
    ]
    if missing or extra or shapes:
        raise CheckpointError(
            f"The weights in {folder} are not those of this {type(model).__name__} "
            f"({differences(missing=missing, unknown=extra, other_shapes=shapes)}): create the model as it was when "
            "the checkpoint was saved."
        )


def _expanded(
    model: torch.nn.Module, weights: dict[str, Any], folder: Path
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For tensors made with `expand`, which torch refuses to write to: a writable view of each, and its new values."""
    own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in own:
        value = weights.get(name)
        if (
            tensor.layout != torch.strided
            or dense_view(tensor, tensor) is tensor
            or not isinstance(value, torch.Tensor)
        ):
            continue
        part = dense_view(value, tensor)
        if not torch.equal(part.expand_as(value), value):
            raise CheckpointError(
                f"{name} of this {type(model).__name__} was created with `expand`, so several of its elements share "
                f"one memory location, but their values in {folder} differ: make it a copy (`.clone()`)."
            )
        weights[name] = tensor
        yield dense_view(tensor, tensor), part


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
    with accepting(model, folder):
        into(weights, **kwargs)


@contextmanager
def accepting(model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """A context in which a model loads the weights in a folder: an error becomes one of the checkpoint."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"This {type(model).__name__} did not accept the weights in {folder} ({in_words(error)}): create it as it "
            "was when the checkpoint was saved."
        ) from error


def loads_as_torch(optimizer: Any) -> bool:
    """Whether an optimizer loads a state as torch's own do. Others run code of their own, which may need the present
    state, and may fail."""
    return (
        type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        and type(optimizer).__setstate__.__module__.startswith("torch.optim.")
        and not has_load_hooks(optimizer)
    )


def _check_form(state: Any, as_torch: bool, path: Path) -> None:
    """Raise if this is not the state of an optimizer at all. as_torch: it is loaded by torch, which needs more."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    fits = isinstance(groups, (list, tuple)) and all(
        isinstance(group, dict) and isinstance(group.get("params"), (list, tuple)) for group in groups
    )
    if fits and as_torch:
        by_parameter = state.get("state")
        fits = isinstance(by_parameter, dict) and all(
            isinstance(values, (dict, list, tuple, torch.Tensor))
            and not (isinstance(values, dict) and isinstance(values.get("step"), str))
            for values in (by_parameter.get(number, {}) for group in groups or () for number in group["params"])
        )  # beside them an optimizer may keep what it likes
    if not fits:
        raise CheckpointError(f"{path} does not hold the state of an optimizer: load another checkpoint.")


def _check_groups(optimizer: Any, state: dict[str, Any], path: Path) -> None:
    expected = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in state["param_groups"]]
    if expected != found:
        raise CheckpointError(
            f"{path} belongs to an optimizer with groups of {found} parameters, but this one has {expected}: "
            "create it as it was when the checkpoint was saved."
        )


def check_kind(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], path: Path) -> None:
    """Raise if these are the groups of another kind of optimizer. It loads as torch's own do."""
    lacking = _lacking(optimizer, groups)
    if lacking:
        raise CheckpointError(
            f"{path} belongs to another kind of optimizer than {type(optimizer).__name__}: it lacks "
            f"{', '.join(lacking)}; create the optimizer as it was when the checkpoint was saved."
        )


def _lacking(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[str]:
    """The settings that these groups lack for an optimizer, apart from those that it adds to older groups itself."""
    twin = object.__new__(type(optimizer))
    own = dict(optimizer.defaults)  # to which torch adds, here and in each load, what no group need have
    try:
        twin.__setstate__({"defaults": own, "state": {}, "param_groups": [dict(group) for group in groups]})
    except Exception:  # it needs more than that to tell
        return []
    needed = set(optimizer.defaults).intersection(*optimizer.param_groups)
    return sorted({name for group in twin.param_groups for name in needed - group.keys()})


def _quick_to_search(state: dict[str, Any]) -> dict[str, Any]:
    """A state whose groups have dicts: for each tensor torch searches them for the number of its parameter."""
    groups = [{**group, "params": dict.fromkeys(group["params"])} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


_PARTS = ("indices", "values", "facts")


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same as dense tensors: a sparse one becomes three, under names of their own."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout == torch.sparse_coo:
            indices, values, coalesced = sparse_parts(tensor)
            parts = (indices.contiguous(), values.contiguous(), torch.tensor([int(coalesced), *tensor.shape]))
            found |= {_part(name, kind): part for kind, part in zip(_PARTS, parts, strict=True)}
        else:
            found[name] = tensor.to_dense()
    return found


def unpacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of `packed`."""
    found = dict(tensors)
    last = _part("", _PARTS[-1])
    for name in [key.removesuffix(last) for key in tensors if key.endswith(last)]:
        indices, values, facts = (found.pop(_part(name, kind)) for kind in _PARTS)
        coalesced, *shape = facts.tolist()
        found[name] = torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=True, is_coalesced=bool(coalesced)
        )
    return found


def _part(name: str, kind: str) -> str:
    return f"{name}#{kind}"


Gradients = dict[str, torch.Tensor]


def read_gradients(run: Run, reader: CheckpointReader, alike: bool = False) -> tuple[Gradients, Gradients]:
    """The gradients that this rank had accumulated locally, and those that all ranks share: reduced already, or a mean.

    On another number of ranks, or if all ranks see the same data (alike), every rank gets the mean.
    """
    sharded_state = layout.gradient_shards()
    everyone: Gradients = read_full(reader.folder / sharded_state) if reader.has(sharded_state) else {}
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
    """The sum of two gradients, on the device and in the dtype of the parameter; None if there is none."""
    found = [
        gradient.to(parameter.device, parameter.dtype, copy=True) for gradient in (one, other) if gradient is not None
    ]
    return sum(found[1:], found[0]) if found else None


def read_full(folder: Path) -> dict[str, Any]:
    """The full content of a folder of shards."""
    from accelerate.checkpoint import sharded_state  # brings in torch.distributed.checkpoint, which few runs need

    return sharded_state.read(folder, sharded_state.whole)


# The names of the parameters of each group.
Names = list[list[str]]


def parameter_names(models: list[torch.nn.Module], optimizer: Any) -> Names:
    """The names of an optimizer's parameters in the models, prefixed with the number of the model if it has several."""
    plain = list(map(unwrapped, models))
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [number for number, model in enumerate(plain) if any(id(p) in own for p in model.parameters())]
    found: dict[int, str] = {}
    for number in owners:
        for name, parameter in plain[number].named_parameters():
            found.setdefault(id(parameter), name if len(owners) == 1 else f"{number}.{name}")
    missing = (f"parameter_{number}" for number in range(len(own)))
    return [[found.get(id(p)) or next(missing) for p in group["params"]] for group in optimizer.param_groups]


def each_its_own(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict of an optimizer, in which a tensor that several parameters have is copied for each.

    FSDP version 1 keeps one count of steps for all parameters that it has flattened together. With parameters of its
    own, an optimizer would count the steps of all of them in it.
    """
    seen = set()

    def own(value: Any) -> Any:
        view = view_of(value) if type(value) is torch.Tensor else None
        if view is None or view not in seen:
            seen.add(view)
            return value
        return value.clone()

    return {
        **state,
        "state": {
            parameter: {key: own(value) for key, value in values.items()} if isinstance(values, dict) else values
            for parameter, values in state["state"].items()
        },
    }


def to_names(state: dict[str, Any], names: Names) -> dict[str, Any]:
    """A state dict of an optimizer with parameter names instead of indices. One with names is returned as it is."""
    groups = state["param_groups"]
    if any(isinstance(parameter, str) for group in groups for parameter in group["params"]):
        return state
    listed = [name for group in names for name in group]
    if sum(len(group["params"]) for group in groups) != len(listed):
        raise _another(groups, names)
    return {
        **state,
        "state": {listed[number]: values for number, values in state["state"].items()},
        "param_groups": [{**group, "params": [listed[number] for number in group["params"]]} for group in groups],
    }


def to_indices(state: dict[str, Any], names: Names) -> dict[str, Any]:
    """A state dict with indices instead of parameter names, in the order of the optimizer's parameters."""
    groups = state["param_groups"]
    if not any(isinstance(parameter, str) for group in groups for parameter in group["params"]):
        return state
    check_names(groups, names)
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    return {
        **state,
        "state": {numbers[name]: values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in own]} for group, own in zip(groups, names, strict=True)
        ],
    }


def check_names(groups: list[dict[str, Any]], names: Names) -> None:
    """Raise if the groups of a state dict are not those of an optimizer."""
    if [sorted(group["params"]) for group in groups] != [sorted(group) for group in names]:
        raise _another(groups, names)


def _another(groups: list[dict[str, Any]], names: Names) -> CheckpointError:
    found, expected = [len(group["params"]) for group in groups], [len(group) for group in names]
    return CheckpointError(
        f"The checkpoint belongs to an optimizer with groups of {found} parameters, but this one has {expected}, or "
        "different parameters: create the model and the optimizer as they were when the checkpoint was saved."
    )
