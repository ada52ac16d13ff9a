"""Device maps: whether they fit a model, and in how few entries they can be said."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.devices import DEVICES
from accelerate.errors import Unfit, warn
from accelerate.text import did_you_mean, some_of
from accelerate.torch_internals.modules import EXTRA_STATE


def check_device_map(model: nn.Module, device_map: Mapping[str, int | str | torch.device]) -> None:
    """Check that a device map covers every tensor of a model, and warn about names that the model does not have.

    Args:
        model: the model.
        device_map: module and tensor names to devices; "" is the whole model.

    Raises:
        ValueError: a tensor has no device.
    """
    tensors = warn_of_unknown_names(model, device_map)
    gaps = [name for name in tensors if closest_entry(name, device_map) is None]
    if gaps:
        raise no_device_for(gaps, f" of this {type(model).__name__}")


def warn_of_unknown_names(model: nn.Module, device_map: Mapping[str, int | str | torch.device]) -> list[str]:
    """Warn if a device map names what a model does not have. Returns the names of the model's tensors."""
    # Extra state is no tensor of a module, and lies nowhere.
    tensors = [name for name in model.state_dict() if name.rpartition(".")[2] != EXTRA_STATE]
    every = (model.named_modules, model.named_parameters, model.named_buffers)  # a state dict lacks some buffers
    known = {name for names in every for name, _ in names(remove_duplicate=False)} | set(tensors)
    unknown = [name + did_you_mean(name, known) for name in device_map if name not in known]
    if unknown:
        warn(
            f"The device map names {some_of(unknown)}, which this {type(model).__name__} does not have: correct "
            "or remove these names."
        )
    return tensors


def no_device_for(names: Sequence[str], of_what: str = "") -> ValueError:
    """The error about tensors that a device map leaves out."""
    them = "it" if len(names) == 1 else "them"
    return ValueError(
        f"The device map has no device for {some_of(names)}{of_what}: add {them}, a module that contains {them}, or '' "
        "for all the rest."
    )


def refuse_devices(device_map: Mapping[str, int | str | torch.device]) -> None:
    """Raise an error if a device map names a device that this machine does not have."""
    for device in dict.fromkeys(device_map.values()):
        try:
            if device != "disk":
                torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise Unfit(
                f"The device map names the device {device!r}, which cannot be used here ({_why_not(device, error)}): "
                "give one of this machine, or 'disk'."
            ) from error


def _why_not(device: int | str | torch.device, error: Exception) -> str:
    try:
        torch.device(device if isinstance(device, str) else "cpu")
    except RuntimeError:  # torch would list every kind of device there is
        kind = str(device).lower().partition(":")[0]
        return f"there is no such device{did_you_mean(kind, ['disk', *(each.name for each in DEVICES)])}"
    return str(error).partition("\n")[0]


def closest_entry(name: str, device_map: Mapping[str, Any]) -> str | None:
    """Return the entry of a device map that applies to a tensor: its own, or that of the closest module around it."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return name if name in device_map else None


def clean_device_map(device_map: MutableMapping[str, Any], module_name: str = "") -> MutableMapping[str, Any]:
    """Write one entry for a module instead of one for each of its parts, where all have the same device.

    Args:
        device_map: module and tensor names to devices. It is changed.
        module_name: clean only the entries below this module; "" is the whole model.

    Returns:
        The same map.
    """
    start = f"{module_name}." if module_name else ""
    below: dict[str, list[str]] = {}
    for name in device_map:
        if name.startswith(start) and name != module_name:
            for parent in _parents(name, module_name):
                below.setdefault(parent, []).append(name)
    # The outermost first: what is left below it is then looked at no more.
    for parent in sorted(below, key=lambda name: name.count(".") + 1 if name else 0):
        names = [name for name in below[parent] if name in device_map]
        devices = {device_map[name] for name in names}
        if parent in device_map:
            devices.add(device_map[parent])
            names.append(parent)
        if len(names) > 1 and len(devices) == 1:
            for name in names:
                del device_map[name]
            device_map[parent] = devices.pop()
    return device_map


def _parents(name: str, top: str) -> list[str]:
    """Iterate over the modules that contain a name, from the innermost up to `top`."""
    parents = []
    while name != top:
        name = name.rpartition(".")[0]
        parents.append(name)
    return parents
