"""How numbers are cast. The base class is full precision: everything stays as it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from accelerate.config.handlers import AutocastKwargs, GradScalerKwargs
from accelerate.devices import Device
from accelerate.precision.scaler import Scaler


class Precision:
    mode = "no"
    scales = False  # whether losses are scaled up

    def __init__(
        self,
        device: Device,
        autocast: AutocastKwargs,
        scaler: GradScalerKwargs,
        scaler_kind: type[Scaler] = Scaler,
    ) -> None:
        self.check(device)
        self.device = device
        self.handler = autocast
        self.scaler = scaler_kind(device.name, **scaler.to_kwargs()) if self.scales else None

    def check(self, device: Device) -> None:
        """Refuse hardware that cannot compute like this."""

    @property
    def casts(self) -> bool:
        """Whether forward passes run in lower precision."""
        return False

    def wrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make the model's forward compute in this precision and hand out fp32."""
        return model

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context that computes in this precision, for code outside the model."""
        return nullcontext()
