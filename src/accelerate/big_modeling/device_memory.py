"""How much memory each device has for a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.sizes import Dtype, compute_module_sizes, get_module_leaves
from accelerate.devices import DEVICES
from accelerate.devices.free_memory import free_host_memory
from accelerate.errors import a_kind_of
from accelerate.text import convert_file_size_to_int

logger: logging.Logger = logging.getLogger(__name__)

# The order in which devices are filled, after those with a number.
_NAMED_DEVICES = ("mps", "cpu", "disk")

MaxMemory = dict[int | str, Any]


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> MaxMemory:
    """Return how many bytes a model may use on each device, in the order in which devices are filled.

    Args:
        max_memory: the limits, in bytes or as text: `{0: "10GB", "cpu": "30GB"}`. By default, all memory that is free
            now.

    Returns:
        Devices (the number of a GPU, "mps", "cpu" or "disk") to bytes.

    Raises:
        ValueError: a limit is for something else.
    """
    if max_memory is None:
        return _free_memory()
    if not isinstance(max_memory, Mapping):
        raise TypeError(
            f'max_memory is {a_kind_of(max_memory)}: pass a dict with a limit for each device, as in {{0: "10GB", '
            '"cpu": "30GB"}.'
        )
    limits: MaxMemory = {
        device: convert_file_size_to_int(limit) if isinstance(limit, str) else limit
        for device, limit in max_memory.items()
    }
    if isinstance(max_memory, MutableMapping):
        max_memory.update(limits)  # transformers goes on with its own dict, and counts on numbers there
    for device in limits:
        if not isinstance(device, int) and device not in _NAMED_DEVICES:
            raise ValueError(
                f"max_memory names the device {device!r}: give the number of a GPU, 'mps', 'cpu' or 'disk'."
            )
    numbered = sorted(device for device in limits if isinstance(device, int))
    there = _numbered_devices()
    for device in numbered:
        if device not in there:
            logger.warning(
                f"max_memory names device {device}, but this machine has {list(there) or 'none with a number'}."
            )
    return {device: limits[device] for device in (*numbered, *_NAMED_DEVICES) if device in limits}


def _accelerator() -> Any:
    return next((device for device in DEVICES if device.available()), None)


def _numbered_devices() -> range:
    device = _accelerator()
    return range(0) if device.name in ("cpu", "mps") else range(device.count())


def _free_memory() -> MaxMemory:
    found: MaxMemory = {}
    device = _accelerator()
    for index in _numbered_devices():
        try:
            # What torch itself needs on a device is taken from it with the first tensor.
            torch.empty(1, device=torch.device(device.name, index))
            found[index] = device.memory(index).free
        except RuntimeError as error:
            logger.info(f"Device {index} cannot be used ({error}): no part of a model will go there.")
    host = free_host_memory()
    # The GPU of a Mac has the memory of the host.
    found["mps" if device.name == "mps" else "cpu"] = host
    return found


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> MaxMemory:
    """Return limits for `infer_auto_device_map` with which all GPUs get about the same share of a model.

    Args:
        model: the model.
        max_memory: the limit of each device, as in `get_max_memory`.
        no_split_module_classes: names of classes that are never split.
        dtype: count floating-point tensors as if cast to it.
        special_dtypes: the same for single tensors, by name.
        low_zero: leave as much room as possible on the first GPU, for example for what `generate` computes there.

    Returns:
        Devices to bytes.
    """
    limits = get_max_memory(max_memory)
    gpus = [device for device, limit in limits.items() if device not in ("cpu", "disk") and limit > 0]
    if not gpus:
        return limits
    if len(gpus) == 1:
        low_zero = False
        if max_memory is None:
            for device in limits:
                if isinstance(device, int):
                    limits[device] *= 0.9
                    logger.info(
                        f"Device {device} keeps a tenth of its memory free for computing: set max_memory to use it."
                    )
                    break

    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(gpus) - 1 if low_zero else len(gpus))
    # A little more than an even share: layers are not cut, so each device would get a bit less and the last too much.
    share += int(1.25 * max(_biggest_unsplit(model, sizes, as_classes(no_split_module_classes)), _mean_layer(sizes)))

    numbered = sorted(device for device in gpus if isinstance(device, int))
    for device in numbered[:-1]:
        if not (low_zero and device == 0):
            limits[device] = min(share, limits[device])
    if low_zero:
        rest = sizes[""] - sum(limits[device] for device in range(1, len(gpus)))
        limits[0] = min(max(0, rest), limits[0])
    return limits


def as_classes(given: Sequence[str | type] | set[str] | str | type | None) -> list[str]:
    """Return names of classes as a list, however they were given: also as one name, or as the classes themselves."""
    if given is None:
        return []
    each = [given] if isinstance(given, (str, type)) else given
    return [one.__name__ if isinstance(one, type) else one for one in each]


def _biggest_unsplit(model: nn.Module, sizes: Mapping[str, Any], classes: list[str]) -> Any:
    """Return the largest size of the first modules of classes that are never split."""
    first: dict[str, Any] = {}
    modules = dict(model.named_modules(remove_duplicate=False)) if classes else {}
    for name, size in sizes.items():
        kind = type(modules.get(name)).__name__
        if name and kind in classes:
            first.setdefault(kind, size)
    return max(first.values(), default=0)


def _mean_layer(sizes: Mapping[str, Any]) -> int:
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    found = [modules[name] for name in get_module_leaves(modules)]
    return int(sum(found) / max(len(found), 1))
