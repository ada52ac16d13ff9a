"""Apple GPUs."""

from __future__ import annotations

import torch

from accelerate.config.enums import DistributedType
from accelerate.devices.base import Device, Memory


class MPS(Device):
    def __init__(self) -> None:
        # torch has no process-group backend for MPS: several processes talk through gloo, over the host.
        super().__init__("mps", backend="gloo", label=DistributedType.MULTI_CPU)

    def available(self) -> bool:
        return torch.backends.mps.is_available()

    def count(self) -> int:
        return 1

    def select(self, index: int) -> torch.device:
        return torch.device("mps")

    def pin(self, index: int) -> torch.device:
        return torch.device("mps", index)

    def seed(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def memory(self, index: int = 0) -> Memory:
        total = torch.mps.recommended_max_memory()
        return Memory(total - torch.mps.current_allocated_memory(), total)

    def supports(self, mode: str) -> bool:
        return mode != "fp8"
