"""NVIDIA and AMD GPUs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from accelerate.available import check_cuda_fp8_capability, is_cuda_available
from accelerate.config.enums import DistributedType
from accelerate.devices.base import Device
from accelerate.devices.transfer import Transfer

if TYPE_CHECKING:
    from accelerate.devices.feed import Feeder

# One for all loaders of the process that feed a GPU: its buffers are used again. Not of the device below, which travels
# to other processes with an Accelerator.
_feeders: dict[torch.device, Feeder] = {}


class CUDA(Device):
    copies_behind = True

    def __init__(self) -> None:
        super().__init__("cuda", backend="nccl", label=DistributedType.MULTI_GPU)

    def available(self) -> bool:
        return is_cuda_available()  # which does not start CUDA

    def lacks_fp8(self) -> str | None:
        if torch.version.hip is not None:
            has, needed = torch.cuda.get_device_capability() >= (9, 4), "an MI300 or newer"
        else:
            has, needed = check_cuda_fp8_capability(), "compute capability 8.9 or more (Ada, Hopper or newer)"
        if has:
            return None
        major, minor = torch.cuda.get_device_capability()
        return f"it needs {needed}, but this {torch.cuda.get_device_name()} has {major}.{minor}"

    def works(self, device: torch.device) -> bool:
        try:
            return not torch.cuda.current_stream(device).query()
        except RuntimeError:  # the error of a kernel, which the training is going to meet, or a graph is being captured
            return False

    def reserve(self, nbytes: int, device: torch.device) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(nbytes, dtype=torch.uint8, device=device)  # torch keeps it, for others

    def transfer(self, device: torch.device, non_blocking: bool) -> Transfer:
        from accelerate.devices.cuda_lane import CudaLane
        from accelerate.devices.feed import Feeder, OverlappedTransfer

        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        if device not in _feeders:
            _feeders[device] = Feeder(CudaLane(device))
        return OverlappedTransfer(_feeders[device], non_blocking)
