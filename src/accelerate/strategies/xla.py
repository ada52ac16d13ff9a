"""XLA devices, each with a copy of the model: gradients are averaged in the step, which is then closed.

So a step is one graph: the backward, the exchange of its gradients, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from accelerate.bundle import Bundle
from accelerate.comm import current
from accelerate.config.enums import DynamoBackend
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.errors import Unfit
from accelerate.precision.stepping import Stepper
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Strategy

# Backends of `torch.compile` that compile nothing themselves.
_LEAVE_IT_TO_XLA = (DynamoBackend.NO, DynamoBackend.EAGER, DynamoBackend.AOT_EAGER)


class XLAReplicated(Strategy):
    # Whether a gradient is finite is known only when the graph has run, and the step with it.
    can_leave_steps_out = False

    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        if state.deepspeed_plugins is not None:
            raise Unfit("DeepSpeed does not run on an XLA device: remove its plugin, or use FSDP.")
        compiler = DynamoBackend.NO if state.dynamo_plugin is None else DynamoBackend(state.dynamo_plugin.backend)
        if compiler not in _LEAVE_IT_TO_XLA:
            raise Unfit(
                f"torch.compile with {compiler.value.lower()!r} does not run on an XLA device, where XLA compiles "
                "every step: leave out `dynamo_backend`."
            )
        if state.parallelism_config is not None:
            raise Unfit(
                f"{state.parallelism_config!r} does not run on an XLA device: remove it, or use FSDP, which shards "
                "over all chips."
            )
        self._close_step = state.device_kind.close_step
        self._several = state.num_processes > 1
        self.needs_even_batches = self._several  # all of them have to collect the same graphs
        # Parameters, by identity, whose gradients are averaged already, and have not changed since.
        self._averaged: set[int] = set()

    def prepare(self, bundle: Bundle) -> None:
        if self.state.downcast_bfloat:
            for model in bundle.models:
                _downcast(model.value)
        super().prepare(bundle)

    def wrap(self, model: torch.nn.Module, *, placed: bool) -> torch.nn.Module:
        """The model itself, with the values that it has on the first process."""
        if self._several and placed:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    current().broadcast(tensor)
            self._close_step()
        return model

    def backward(self, loss: torch.Tensor, *, divide: bool = True, **kwargs: Any) -> None:
        self._averaged.clear()
        self.gradient_state.is_xla_gradients_synced = False
        loss.backward(**kwargs)

    def complete_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace gradients by their means over all processes: once, whoever asks first."""
        if not self._several:
            return
        waiting = [p for p in parameters if p.grad is not None and id(p) not in self._averaged]
        current().average([p.grad for p in waiting if p.grad is not None])
        self._averaged.update(map(id, waiting))
        self.gradient_state.is_xla_gradients_synced = True

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        self.complete_gradients(parameters)
        super().clip_grad_value_(parameters, clip_value)

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        self.complete_gradients(parameters)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """On the host, where the names of one parameter share its memory."""
        state: dict[str, Any] = self.state.device_kind.storable(super().state_dict(model, unwrap=unwrap))
        return state

    def stepper(self, optimizer: Any, scaler: torch.amp.GradScaler | None) -> Stepper:
        return ClosingStepper(optimizer, self)

    def end_step(self) -> None:
        """The step was taken: its graph runs, and the next gradients are new ones."""
        self._averaged.clear()
        self.gradient_state.is_xla_gradients_synced = False
        self._close_step()


def _downcast(model: torch.nn.Module) -> None:
    """Single precision becomes bf16, and double becomes single; parameters stay the same objects."""
    smaller = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(smaller.get(tensor.dtype, tensor.dtype))


class ClosingStepper(Stepper):
    def __init__(self, optimizer: Any, strategy: XLAReplicated) -> None:
        super().__init__(optimizer)
        self._strategy = strategy

    def step(self, closure: Callable[[], Any] | None = None, *, last: bool = True) -> Any:
        if closure is None:
            self._average()
            result = super().step(last=last)
        else:
            result = super().step(lambda: self._averaged(closure), last=last)
        self._strategy.end_step()
        return result

    def _average(self) -> None:
        self._strategy.complete_gradients(p for group in self.optimizer.param_groups for p in group["params"])

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._average()
        return loss

    def for_other(self, optimizer: Any) -> Stepper:
        return type(self)(optimizer, self._strategy)
