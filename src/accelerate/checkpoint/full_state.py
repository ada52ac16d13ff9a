"""Models and optimizers that every process has as a whole: one file each, written by one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import layout
from accelerate.checkpoint.gradients import added, read_full, read_gradients
from accelerate.checkpoint.model_weights import check_fit, with_tied
from accelerate.checkpoint.optimizer_keys import parameter_names, to_indices
from accelerate.checkpoint.parts import File, StagedLoad
from accelerate.checkpoint.reader import CPU, CheckpointReader, Destination, FindDestination
from accelerate.checkpoint.rollback import dense_view, snapshot_model, snapshot_optimizer
from accelerate.checkpoint.run_state import Run, load_into, named_parameters, unwrapped
from accelerate.devices import Device
from accelerate.errors import CheckpointError, in_words
from accelerate.io.objects import each_once
from accelerate.io.safe_load import read_torch
from accelerate.modules import loads_by_own_code, overrides_load
from accelerate.torch_internals.modules import has_pre_load_hooks, load_state
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


def load(run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
    """Read the files and see that they fit; returns what puts them into the run.

    torch_load: arguments for `torch.load`, which then reads by itself. kwargs: for the `load_state_dict` of models.
    """
    if kwargs.keys() - {"strict", "assign"}:
        _check_keywords(run.models, kwargs)
    targets = [*_models(run, reader, kwargs), *_optimizers(run, reader, torch_load)]
    gradients, everyone = read_gradients(run, reader)

    def apply_fallible(undo: ExitStack) -> None:
        reader.bring_in()
        for target in targets:
            if target.snapshot is not None:
                target.snapshot(undo)
                target.apply()

    def apply_in_place() -> None:
        reader.fill()
        for target in targets:
            if target.snapshot is None:
                target.apply()
        for name, parameter in named_parameters(run.models).items():
            parameter.grad = added(gradients.get(name), everyone.get(name), parameter)

    return StagedLoad(apply_in_place, apply_fallible)


@dataclass
class _Target:
    """A model or an optimizer that was read for.

    snapshot: where loading may fail halfway: has `undo` give it back what it has now.
    """

    apply: Callable[[], None]
    snapshot: Callable[[ExitStack], None] | None


def _models(run: Run, reader: CheckpointReader, kwargs: dict[str, Any]) -> Iterator[_Target]:
    assign, strict = kwargs.get("assign", False), kwargs.get("strict", True)
    # An optimizer comes after the weights, which go back if it objects.
    optimizers = run.optimizers_after_models or run.optimizers
    fallible = not all(_loads_as_torch(_inner(optimizer)) for optimizer in optimizers)
    for number, model in enumerate(map(unwrapped, run.models_to_load)):
        own_code = loads_by_own_code(model)
        in_place = not (assign or own_code or fallible)
        weights = _read_model(model, run.device, reader, number, in_place)
        weights = _fitting(model, weights, reader.folder, strict)
        expanded = [] if assign or own_code else list(_expanded(model, weights, reader.folder))
        into = model.load_state_dict if own_code else partial(load_state, model)
        yield _Target(
            partial(_load_model, model, into, weights, expanded, reader.folder, kwargs),
            partial(snapshot_model, model) if own_code or fallible else None,
        )


def _optimizers(run: Run, reader: CheckpointReader, torch_load: dict[str, Any]) -> Iterator[_Target]:
    for number, optimizer in enumerate(run.optimizers):
        name, inner = layout.optimizer(number), _inner(optimizer)
        as_torch = _loads_as_torch(inner)  # found out now, for a hook may remove itself
        if reader.has(layout.optimizer_shards(number)):
            state = {"state": {}, **read_full(reader.folder / layout.optimizer_shards(number))}
        elif torch_load:
            state = read_torch(reader.path(name), **torch_load)
        else:
            state = reader.content(name, _places_in(optimizer, run.device))
        state = to_indices(state, parameter_names(run.models, optimizer))  # as engines save that hold shards
        _check_groups(optimizer, state, reader.folder / name)
        if as_torch:
            state = _quick_to_search(state)
        yield _Target(
            partial(load_into, optimizer, state, name, inner),
            None if as_torch else partial(snapshot_optimizer, optimizer),
        )


def _check_keywords(models: list[torch.nn.Module], kwargs: dict[str, Any]) -> None:
    for model in map(unwrapped, models):
        try:
            inspect.signature(model.load_state_dict).bind({}, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"load_state was given {', '.join(kwargs)}, and the load_state_dict of {type(model).__name__} {error}: "
                "leave that out."
            ) from None


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


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


def _places_in(optimizer: Any, device: Device) -> FindDestination:
    """Where the state of each parameter goes when an optimizer loads it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    inner = _inner(optimizer)
    keeps = _loads_as_torch(inner)

    def place(keys: tuple[Any, ...]) -> Destination:
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
    """The weights under the names of the model; raises before anything is copied where they are of another one."""
    weights = with_tied(model, weights)
    if not any(map(has_pre_load_hooks, model.modules())) and not overrides_load(model):  # else it changes what it gets
        check_fit(model, model.state_dict(), weights, folder, strict)
    return weights


def _expanded(
    model: torch.nn.Module, weights: dict[str, Any], folder: Path
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For tensors made with `expand`, which torch refuses to copy to: the memory behind each, and its new content."""
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
                f"{name} of this {type(model).__name__} was made with `expand`, so that several of its values are "
                f"one, and those in {folder} differ: give it memory of its own (`.clone()`)."
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
    try:
        into(weights, **kwargs)
    except Exception as error:
        raise CheckpointError(
            f"This {type(model).__name__} has not taken the weights in {folder} ({in_words(error)}): create it as it "
            "was when the checkpoint was saved."
        ) from error


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
