"""How numbers are cast. The base class is full precision: everything stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from accelerate.bundle import Bundle
from accelerate.config.enums import FP8BackendType
from accelerate.config.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler
from accelerate.devices import Device
from accelerate.precision.scaler import Scaler


@dataclass
class PrecisionSettings:
    """What a precision may be told: the handlers of the Accelerator, and the scaler that its engine needs."""

    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    scaler_kind: type[Scaler] = Scaler
    recipe: KwargsHandler | None = None  # how to compute in fp8


class Precision:
    mode = "no"
    casts = False  # whether forward passes run in lower precision
    scales = False  # whether losses are scaled up
    acts_after_step = False  # whether `after_step` does anything
    can_be_sharded = True  # whether an engine may cut the parameters of a model that was converted
    fp8_backend = FP8BackendType.NO  # the library that computes in fp8

    def __init__(self, device: Device, settings: PrecisionSettings) -> None:
        self.check(device)
        self.device = device
        self.handler: AutocastKwargs = settings.autocast
        self.scaler: Scaler | None = (
            settings.scaler_kind(device.name, **settings.scaler.to_kwargs()) if self.scales else None
        )

    @classmethod
    def chosen(cls, kinds: Sequence[type[Precision]], device: Device, settings: PrecisionSettings) -> type[Precision]:
        """Which of the kinds that have this mode is used, the best of which is this one."""
        return cls

    def check(self, device: Device) -> None:
        """Refuse hardware that cannot compute like this."""

    def convert(self, bundle: Bundle) -> None:
        """Make the models compute in this precision and hand out fp32, before they are spread.

        A precision that replaces modules or parameters sees to the optimizers of the bundle, too.
        """

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context that computes in this precision: that of a forward, also for code outside the model."""
        return nullcontext()

    def before_sharding(self, model: torch.nn.Module, left_out: Collection[torch.nn.Module]) -> None:
        """Called for a model whose weights are about to be cut, to be gathered part by part: they may be so in 8 bits.

        left_out: modules whose weights stay whole.
        """

    def after_step(self, models: list[torch.nn.Module]) -> None:
        """Called after each step, also one that was skipped, where `acts_after_step`. models: all that are prepared."""
