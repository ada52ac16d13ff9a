"""The gradient scaler where each process holds a piece of every gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accelerate.precision.scaler import Scaler


class ShardedScaler(Scaler):
    """A scaler whose processes agree on whether a step is skipped: an infinite value may lie in the piece of one."""

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        gradients: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        with torch.no_grad():
            for piece in self.gradients(optimizer):
                gradients.setdefault((piece.device, piece.dtype), []).append(piece)
            flags = {found_inf.device: found_inf}
            for (device, _), pieces in gradients.items():
                flag = flags.setdefault(device, found_inf.to(device, copy=True))
                torch._amp_foreach_non_finite_check_and_unscale_(pieces, flag, inv_scale.to(device))
            for flag in flags.values():
                found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        # Fused optimizers would unscale by themselves, with flags that are no sharded tensors.
        state = self._per_optimizer_states[id(optimizer)]
        if self._enabled and state["stage"].value == 0:
            self.unscale_(optimizer)
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            state["stage"] = type(state["stage"]).STEPPED
            result: float | None = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            return result
        return super().step(optimizer, *args, **kwargs)

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        with torch.no_grad():
            return [g.to_local() if hasattr(g, "to_local") else g for g in super().gradients(optimizer)]
