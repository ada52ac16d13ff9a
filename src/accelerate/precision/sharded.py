"""The gradient scaler where each process holds a piece of every gradient."""

from __future__ import annotations

import torch

from accelerate.comm import current
from accelerate.precision.scaler import Scaler
from accelerate.torch_internals.grad_scaler import GradScalerOfPieces


class ShardedScaler(Scaler, GradScalerOfPieces):
    """A scaler whose processes agree on whether a step is skipped: an infinite value may lie in the piece of one."""

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        with torch.no_grad():
            return [g.to_local() if hasattr(g, "to_local") else g for g in super().gradients(optimizer)]

    def agree(self, found_inf: torch.Tensor) -> None:
        current().all_reduce(found_inf, "max")
