"""One XLA device: a step is closed when its optimizer has been called, so that its graph runs as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.errors import Unfit
from accelerate.precision.stepping import Stepper
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Strategy


class XLA(Strategy):
    # Whether a gradient is finite is known only when the graph has run, and the step with it.
    can_leave_steps_out = False

    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        for plugin, name in ((state.deepspeed_plugins, "DeepSpeed"), (getattr(state, "fsdp_plugin", None), "FSDP")):
            if plugin is not None:
                raise Unfit(f"{name} does not run on an XLA device in this version: remove its plugin.")
        self._close_step = state.device_kind.close_step

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """On the host, where the names of one parameter share its memory."""
        state: dict[str, Any] = self.state.device_kind.storable(super().state_dict(model, unwrap=unwrap))
        return state

    def stepper(self, optimizer: Any, scaler: torch.amp.GradScaler | None) -> Stepper:
        return ClosingStepper(optimizer, self._close_step)


class ClosingStepper(Stepper):
    def __init__(self, optimizer: Any, close_step: Callable[[], Any]) -> None:
        super().__init__(optimizer)
        self._close_step = close_step

    def step(self, closure: Callable[[], Any] | None = None, *, last: bool = True) -> Any:
        result = super().step(closure, last=last)
        self._close_step()
        return result

    def for_other(self, optimizer: Any) -> Stepper:
        return type(self)(optimizer, self._close_step)
