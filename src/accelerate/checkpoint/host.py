"""Copies in host memory: pinned where they come from a GPU, which is many times faster."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from accelerate.devices import Device


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in host memory; it is there when the device is done."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda", requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)


def on_host(content: Any, *, untouched: bool) -> Any:
    """Nested contents with their tensors in host memory. untouched: also what lies there already is copied."""
    copies: dict[Any, torch.Tensor] = {}
    devices: set[torch.device] = set()

    def of_tensor(value: torch.Tensor) -> torch.Tensor:
        if value.device.type == "cpu" and not untouched:
            return value
        devices.add(value.device)
        if value.numel() == 0:
            return host_copy(value)
        # The same tensor under two names stays one.
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies:
            copies[key] = host_copy(value)
        return copies[key]

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return of_tensor(value)
        if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
            twin = copy.copy(value)
            twin.update({name: of(item) for name, item in value.items()})
            return twin
        if type(value) in (list, tuple):
            return type(value)(of(item) for item in value)
        return copy.deepcopy(value) if untouched else value

    result = of(content)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result


def snapshot(parts: Iterable[tuple[str, Any, bool]], device: Device) -> list[tuple[str, Any, bool]]:
    """The parts of a checkpoint as they are now, in memory that training does not touch."""
    taken = [(name, on_host(content, untouched=True), safe) for name, content, safe in parts]
    device.synchronize()
    return taken
