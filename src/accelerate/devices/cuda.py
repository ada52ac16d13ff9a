"""NVIDIA and AMD GPUs."""

from __future__ import annotations

import torch

from accelerate.available import check_cuda_fp8_capability, is_cuda_available
from accelerate.config.enums import DistributedType
from accelerate.devices.base import Device


class CUDA(Device):
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
        return f"it takes {needed}, and this {torch.cuda.get_device_name()} has {major}.{minor}"

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()
