"""The processor: always there."""

from __future__ import annotations

import torch

from accelerate.config.enums import DistributedType
from accelerate.devices.base import Device, Memory
from accelerate.devices.transfer import CpuTransfer


class CPU(Device):
    def __init__(self) -> None:
        super().__init__("cpu", backend="gloo", label=DistributedType.MULTI_CPU)

    def available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def select(self, index: int) -> torch.device:
        return torch.device("cpu")

    def pin(self, index: int) -> torch.device:
        return torch.device("cpu", index)

    def seed(self, seed: int) -> None:
        """Nothing beyond `torch.manual_seed`, which `set_seed` calls for every device."""

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        """Everything is already done."""

    def empty_cache(self) -> None:
        """There is none."""

    def memory(self, index: int = 0) -> Memory:
        import psutil

        memory = psutil.virtual_memory()
        return Memory(memory.available, memory.total)

    def supports(self, mode: str) -> bool:
        return True

    def lacks_fp8(self) -> str | None:
        return None  # emulated, where a library can

    transfer = CpuTransfer
