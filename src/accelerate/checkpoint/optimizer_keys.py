"""The state of an optimizer by the names of its parameters, which do not depend on how they are spread."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.errors import CheckpointError
from accelerate.unwrap import extract_model_from_parallel

# The names of the parameters of each group.
Names = list[list[str]]


def parameter_names(models: list[torch.nn.Module], optimizer: Any) -> Names:
    """What the parameters of an optimizer are called in the models; with several models, after their numbers."""
    plain = [extract_model_from_parallel(model, keep_torch_compile=False) for model in models]
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [number for number, model in enumerate(plain) if any(id(p) in own for p in model.parameters())]
    found: dict[int, str] = {}
    for number in owners:
        for name, parameter in plain[number].named_parameters():
            found.setdefault(id(parameter), name if len(owners) == 1 else f"{number}.{name}")
    missing = (f"parameter_{number}" for number in range(len(own)))
    return [[found.get(id(p)) or next(missing) for p in group["params"]] for group in optimizer.param_groups]


def to_names(state: dict[str, Any], names: Names) -> dict[str, Any]:
    """A state dict of an optimizer with names in place of numbers; one that has them already stays as it is."""
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
    """A state dict with names as the optimizer itself takes it, in the order that it has its parameters in."""
    groups = state["param_groups"]
    if not any(isinstance(parameter, str) for group in groups for parameter in group["params"]):
        return state
    if [sorted(group["params"]) for group in groups] != [sorted(group) for group in names]:
        raise _another(groups, names)
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    return {
        **state,
        "state": {numbers[name]: values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in own]} for group, own in zip(groups, names, strict=True)
        ],
    }


def _another(groups: list[dict[str, Any]], names: Names) -> CheckpointError:
    found, expected = [len(group["params"]) for group in groups], [len(group) for group in names]
    return CheckpointError(
        f"The checkpoint is of an optimizer with groups of {found} parameters, and this one has {expected}, or other "
        "ones: create the model and the optimizer as they were when the checkpoint was saved."
    )
