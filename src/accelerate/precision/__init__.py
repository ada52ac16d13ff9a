"""How numbers are cast: one file per kind, chosen once per accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate.config.handlers import AutocastKwargs
from accelerate.devices import Device
from accelerate.precision.autocast import Autocast
from accelerate.precision.base import Precision, PrecisionSettings
from accelerate.precision.scaled import Scaled
from accelerate.precision.scaler import Scaler

__all__ = [
    "PRECISIONS",
    "Autocast",
    "Precision",
    "PrecisionSettings",
    "Scaled",
    "Scaler",
    "create",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
]

# By mode, and by the library that computes in it where there are several; "torch" is torch itself.
PRECISIONS: dict[tuple[str, str], type[Precision]] = {
    (kind.mode, "torch"): kind for kind in (Precision, Autocast, Scaled)
}


def create(mode: str, device: Device, settings: PrecisionSettings | None = None, backend: str = "torch") -> Precision:
    """The precision called `mode` ("no", "bf16", "fp16") on this hardware, by that backend."""
    return PRECISIONS[mode, backend](device, settings or PrecisionSettings())


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[None]:
    """The autocast context of the current mixed precision, or one that does nothing."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    if not native_amp:
        return nullcontext()
    return create(state.mixed_precision, state.device_kind).autocast(autocast_kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A gradient scaler for the current device."""
    from accelerate.state import PartialState

    return Scaler(PartialState().device_kind.name, **kwargs)
