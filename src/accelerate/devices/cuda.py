"""NVIDIA and AMD GPUs."""

from __future__ import annotations

import torch

from accelerate.available import is_cuda_available
from accelerate.config.enums import DistributedType
from accelerate.devices.base import Device


class CUDA(Device):
    def __init__(self) -> None:
        super().__init__("cuda", backend="nccl", label=DistributedType.MULTI_GPU)

    def available(self) -> bool:
        return is_cuda_available()  # which does not start CUDA

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()
