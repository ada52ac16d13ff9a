"""Which hardware: one class per kind, vendors as data, and the choice between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from accelerate.available import has_package
from accelerate.config.environment import str_to_bool
from accelerate.devices.base import Device, Memory
from accelerate.devices.cpu import CPU
from accelerate.devices.cuda import CUDA
from accelerate.devices.mps import MPS
from accelerate.devices.transfer import BlockingTransfer, Transfer
from accelerate.devices.vendors import VENDORS
from accelerate.devices.xla import XLA
from accelerate.errors import Unfit

__all__ = [
    "CPU",
    "CUDA",
    "DEVICES",
    "MPS",
    "VENDORS",
    "XLA",
    "Choice",
    "Device",
    "Memory",
    "Transfer",
    "by_name",
    "choose",
    "copies_behind",
    "kind_of",
    "transfers_to",
]

# In the order of preference; the processor is last because it is always available.
DEVICES: tuple[Device, ...] = (XLA(), MPS(), CUDA(), *VENDORS, CPU())


class Choice(NamedTuple):
    """The hardware a process uses, the index it was pinned to by hand (if any), and why."""

    device: Device
    pinned: int | None
    reason: str


def by_name(name: str, devices: Sequence[Device] = DEVICES) -> Device:
    for device in devices:
        if device.name == name:
            return device
    known = ", ".join(device.name for device in devices)
    raise Unfit(f"There is no device called {name!r}: choose one of {known}.")


def kind_of(device: torch.device) -> Device | None:
    """The kind of hardware that a device of torch is; None for one that is not in the table, such as `meta`."""
    return next((kind for kind in DEVICES if kind.name == device.type), None)


def copies_behind(device: torch.device) -> bool:
    """Whether copies between a device and pinned host memory go on behind the program."""
    kind = kind_of(device)
    return kind is not None and kind.copies_behind


def transfers_to(device: torch.device | str | int | None, non_blocking: bool = False) -> Callable[[], Transfer]:
    """What makes the transfer of each iteration, by which batches get to `device`; None leaves them where they are."""
    if device is None:
        return Transfer
    device = torch.device(device)
    kind = kind_of(device)
    return partial(BlockingTransfer if kind is None else kind.transfer, device, non_blocking)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    try:
        return bool(str_to_bool(environ.get(name, "false")))
    except ValueError as error:
        raise ValueError(f"The environment variable {name} cannot be read: {error}") from None


def choose(environ: Mapping[str, str], cpu: bool = False, devices: Sequence[Device] = DEVICES) -> Choice:
    """The device that the script, then the environment, then the machine asks for."""
    wanted = environ.get("ACCELERATE_TORCH_DEVICE", "")
    name, _, index = wanted.partition(":")
    if wanted and (name not in {device.name for device in devices} or (index and not index.isdigit())):
        known = ", ".join(device.name for device in devices)
        raise Unfit(f"ACCELERATE_TORCH_DEVICE is {wanted!r}: write it like `cuda` or `cuda:1`, with one of {known}.")
    asked_for_cpu = _flag(environ, "ACCELERATE_USE_CPU")
    if cpu or asked_for_cpu:
        reason = "the script asked for the CPU" if cpu else "ACCELERATE_USE_CPU is set"
        return Choice(by_name("cpu", devices), int(index) if name == "cpu" and index.isdigit() else None, reason)
    if wanted:
        device = by_name(name, devices)
        if not device.available():
            why = f"torch finds no {name} on this machine: "
            if device.plugin is not None and not has_package(device.plugin):
                why = f"{device.plugin} is not installed: install it, "
            raise Unfit(f"ACCELERATE_TORCH_DEVICE is {wanted!r}, but {why}name another device, or unset the variable.")
        return Choice(device, int(index) if index else None, f"ACCELERATE_TORCH_DEVICE is {wanted}")
    for device in devices:
        if device.available():
            return Choice(device, None, f"{device.name} is the first available device of this machine")
    return Choice(CPU(), None, "no other device is available")


if "IPython" in sys.modules:
    # A notebook may call for several processes later, and then wants to know which of its cells started CUDA.
    from accelerate.devices import cuda_start

    cuda_start.remember()
