"""The gradient scalers of fp16 training, safe for several optimizers."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.comm import current
from accelerate.torch_internals.grad_scaler import GradScalerOfPieces, factor_of
from accelerate.torch_internals.tensors import multiply_


class Scaler(torch.amp.GradScaler):
    """torch's GradScaler that updates its factor once per backward, when every optimizer has stepped.

    torch asks for one `update()` after all optimizers of an iteration. An update after each of them would forget
    that the gradients of the others are unscaled already, and unscale them a second time. Gradients that another
    optimizer is still accumulating follow the factor.
    """

    _update_pending = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizers: list[torch.optim.Optimizer] = []

    def finish_step(self) -> None:
        """An optimizer has stepped: update now if it is the only one, else when all the others had their chance."""
        if len(self.optimizers) <= 1:
            self.update()
        else:
            self._update_pending = True

    def flush(self) -> None:
        if not self._update_pending:
            return
        self._update_pending = False
        before = factor_of(self)
        self.update()
        gradients = [gradient for optimizer in self.optimizers for gradient in self.gradients(optimizer)]
        if gradients:
            multiply_(gradients, factor_of(self) / before)

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """What this process holds of the gradients of an optimizer's parameters."""
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def scale(self, outputs: Any) -> Any:
        self.flush()
        return super().scale(outputs)

    def get_scale(self) -> float:
        self.flush()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return super().state_dict()


class ShardedScaler(Scaler, GradScalerOfPieces):
    """For gradients of which each process holds a piece: an infinite value in that of one has all skip the step."""

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        with torch.no_grad():
            return [g.to_local() if hasattr(g, "to_local") else g for g in super().gradients(optimizer)]

    def agree(self, found_inf: torch.Tensor) -> None:
        current().all_reduce(found_inf, "max")
