"""How numbers are cast: one file per kind, chosen once per accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

from accelerate.config.handlers import AutocastKwargs
from accelerate.devices import Device
from accelerate.precision.base import Precision, PrecisionSettings
from accelerate.precision.scaler import Scaler

__all__ = [
    "PRECISIONS",
    "Precision",
    "PrecisionSettings",
    "Scaler",
    "create",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "kinds_of",
    "load",
]

# By mode, and by the library that computes in it, the best first; "torch" is torch itself. Imported when it is chosen.
PRECISIONS: dict[tuple[str, str], str] = {
    ("no", "torch"): "base.Precision",
    ("bf16", "torch"): "autocast.Autocast",
    ("fp16", "torch"): "autocast.Scaled",
    ("fp8", "ao"): "ao.TorchAO",
    ("fp8", "te"): "transformer_engine.TransformerEngine",
    ("fp8", "msamp"): "msamp.MSAMP",
}


def load(mode: str, backend: str = "torch") -> type[Precision]:
    """The class of a precision."""
    module, _, name = PRECISIONS[mode, backend].partition(".")
    kind: type[Precision] = getattr(import_module(f"{__name__}.{module}"), name)
    return kind


def kinds_of(mode: str) -> list[type[Precision]]:
    """The classes that have this mode, the best first."""
    return [load(known, backend) for known, backend in PRECISIONS if known == mode]


def create(mode: str, device: Device, settings: PrecisionSettings | None = None) -> Precision:
    """The precision called `mode` on this hardware; of several libraries that have it, that asked for or the best."""
    settings = settings or PrecisionSettings()
    kinds = kinds_of(mode)
    return kinds[0].chosen(kinds, device, settings)(device, settings)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[None]:
    """Return the autocast context of the current mixed precision, or one that does nothing.

    Args:
        native_amp: whether mixed precision is used at all.
        autocast_kwargs: settings of `torch.autocast`.
    """
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    if not native_amp:
        return nullcontext()
    # Around what a library computes in fp8, everything is in bf16.
    mode = "bf16" if state.mixed_precision == "fp8" else state.mixed_precision
    return create(mode, state.device_kind).autocast(autocast_kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Create a gradient scaler for the current device.

    Args:
        distributed_type: not used; accepted as in the 1.15 release.
        kwargs: arguments of the scaler.
    """
    from accelerate.state import PartialState

    return Scaler(PartialState().device_kind.name, **kwargs)
