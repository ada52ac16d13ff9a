"""The device that tests run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate import available

# In the order of preference; the names are those of torch's modules.
_DEVICES = ("cuda", "mps", "mlu", "sdaa", "musa", "npu", "xpu", "hpu", "neuron")


def get_backend() -> tuple[str, int, Callable[..., int]]:
    """Return the device type, the number of devices, and the function that returns the memory in use."""
    if available.is_torch_xla_available():
        return "xla", torch.cuda.device_count(), torch.cuda.memory_allocated
    for name in _DEVICES:
        if getattr(available, f"is_{name}_available")():
            module: Any = getattr(torch, name)
            allocated = getattr(module, "memory_allocated", None) or module.current_allocated_memory
            return name, module.device_count(), allocated
    return "cpu", 1, lambda: 0


torch_device: str
device_count: int
memory_allocated_func: Callable[..., int]
torch_device, device_count, memory_allocated_func = get_backend()
