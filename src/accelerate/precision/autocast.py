"""bf16 and fp16: forward passes under `torch.autocast`, outputs in fp32."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from accelerate.bundle import Bundle
from accelerate.comm.tree import convert_to_fp32
from accelerate.config.handlers import AutocastKwargs
from accelerate.devices import Device
from accelerate.precision.base import Precision
from accelerate.torch_internals.compile import is_compiled, original_of


class Autocast(Precision):
    """bf16, which needs no scaling of the loss."""

    mode = "bf16"
    dtype: torch.dtype = torch.bfloat16
    casts = True

    def check(self, device: Device) -> None:
        if not device.supports(self.mode):
            others = "'bf16', or 'no'" if device.supports(Autocast.mode) else "'no'"
            raise ValueError(f"mixed_precision={self.mode!r} does not run on this {device.name} device: use {others}.")

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        return self._context(handler or self.handler)()

    def _context(self, handler: AutocastKwargs) -> Callable[[], AbstractContextManager[None]]:
        return functools.partial(
            torch.autocast,
            device_type=self.device.name,
            dtype=self.dtype,
            enabled=handler.enabled,
            cache_enabled=handler.cache_enabled,
        )

    def convert(self, bundle: Bundle) -> None:
        for model in bundle.models:
            self._cast_forward(model.value)

    def _cast_forward(self, model: torch.nn.Module) -> None:
        # What `torch.compile` returned has no forward of its own: the casts belong into what it compiles.
        inner: Any = original_of(model) if is_compiled(model) else model
        original = inner.forward
        inner._original_forward = original
        context = self._context(self.handler)
        function = getattr(original, "__func__", None)
        if function is None:
            # The instance carries a forward of its own, a plain function that needs no `self`.
            inner.forward = _cast(original, context)
        else:
            # A method, not a closure over the model: a deep copy of the model must call its own forward.
            inner.forward = types.MethodType(_cast(function, context), inner)


class Scaled(Autocast):
    """The same in fp16, with a loss scaled up so that small gradients do not vanish."""

    mode = "fp16"
    dtype: torch.dtype = torch.float16
    scales = True


def _cast(forward: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def casting_forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            outputs = forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    return casting_forward
