"""Parameters that a model has under several names."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.device_map_checks import closest_entry
from accelerate.big_modeling.module_walk import Modules, all_modules
from accelerate.torch_internals.modules import parameters_of

logger: logging.Logger = logging.getLogger(__name__)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of tied parameters: one sorted list for each parameter that has several names.

    Args:
        model: the model.
        **kwargs: not used; accepted as in the 1.15 release.
    """
    return ties_in(all_modules(model))


def ties_in(modules: Modules) -> list[list[str]]:
    """Do what `find_tied_parameters` does, for a model whose modules are already known."""
    known = [id(value) for _, module in modules for value in parameters_of(module).values() if value is not None]
    tied = {key for key, count in Counter(known).items() if count > 1} if len(set(known)) < len(known) else set()
    groups: dict[int, list[str]] = {}
    for module_name, module in modules if tied else ():
        for name, value in parameters_of(module).items():
            if id(value) in tied:
                groups.setdefault(id(value), []).append(f"{module_name}.{name}" if module_name else name)
    return [sorted(group) for group in groups.values()]


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Make the names of each group refer to one parameter again: the first that holds values, on any device.

    Args:
        model: the model.
        tied_params: groups of names, from `find_tied_parameters`.
    """
    for group in tied_params:
        places = [_place(model, name) for name in group]
        values = [getattr(module, attribute, None) for module, attribute in places]
        kept = next((value for value in values if value is not None and not value.is_meta), None)
        if kept is not None:
            for module, attribute in places:
                setattr(module, attribute, kept)


def _place(model: nn.Module, name: str) -> tuple[Any, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Tell whether the config of a transformers model, or one of its modules, asks for tied weights.

    Args:
        model: the model.
    """
    # Where transformers has not been imported, the model is none of its; importing it takes seconds.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return False
    parts: list[Any] = [module for module in model.modules() if isinstance(module, modeling.PreTrainedModel)]
    for part in parts:
        config = part.config
        if getattr(config, "tie_word_embeddings", False) and part.get_output_embeddings() is not None:
            return True
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
            return True
    return bool(parts) and any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, int | str | torch.device]
) -> None:
    """Warn if a device map puts the names of one parameter on several devices.

    Args:
        tied_params: groups of names, from `find_tied_parameters`.
        device_map: module and tensor names to devices.
    """
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            placed = ", ".join(f"{name} on {device}" for name, device in devices.items())
            logger.warning(f"One parameter has several devices ({placed}): give all its names the same one.")


def device_of(name: str, device_map: Mapping[str, int | str | torch.device]) -> Any:
    """Return the device that a map gives to a tensor or module: that of its own entry, or of the closest parent."""
    entry = closest_entry(name, device_map)
    if entry is None:
        raise ValueError(f"The device map has no device for {name}: add it, or a module that contains it, or ''.")
    return device_map[entry]
