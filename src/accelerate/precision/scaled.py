"""fp16: autocast, and a loss scaled up so that small gradients do not vanish."""

from __future__ import annotations

import torch

from accelerate.config.handlers import AutocastKwargs, GradScalerKwargs
from accelerate.devices import Device
from accelerate.precision.autocast import Autocast
from accelerate.precision.scaler import Scaler


class Scaled(Autocast):
    mode = "fp16"
    dtype = torch.float16

    def __init__(
        self,
        device: Device,
        autocast: AutocastKwargs,
        scaler: GradScalerKwargs,
        scaler_kind: type[Scaler] = Scaler,
    ) -> None:
        super().__init__(device, autocast, scaler, scaler_kind)
        self.scaler = scaler_kind(device.name, **scaler.to_kwargs())
