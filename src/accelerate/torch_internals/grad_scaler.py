"""torch.amp.GradScaler: its factor, what it knows of each optimizer, and a scaler for gradients in pieces."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.torch_internals.missing import gone
from accelerate.torch_internals.optimizers import decides_on_the_device


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Whether a scaler has scaled a loss yet; True, so that nobody is warned, where torch does not tell."""
    return getattr(scaler, "_scale", True) is not None


def factor_of(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """A copy of the factor of a scaler that has scaled a loss, on its device.

    Without the tensor itself it is asked for by `get_scale`, which waits for the device.
    """
    factor: torch.Tensor | None = getattr(scaler, "_scale", None)
    return torch.tensor(torch.amp.GradScaler.get_scale(scaler)) if factor is None else factor.clone()


def unscale_once(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Unscale the gradients of an optimizer, unless they are already: torch raises when it is asked to twice.

    Without the scaler's table of optimizers, what torch raises then is not passed on.
    """
    try:
        scaled = _state_of(scaler, optimizer)["stage"].value == 0
    except (AttributeError, KeyError):
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            if "unscale_()" not in str(error):
                raise
        return
    if scaled:
        scaler.unscale_(optimizer)


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Flags on the devices, which say whether a gradient of an optimizer was infinite in the step just taken.

    Without the scaler's table the gradients are looked through once more, which takes longer.
    """
    try:
        return list(_state_of(scaler, optimizer)["found_inf_per_device"].values())
    except (AttributeError, KeyError):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [~torch.isfinite(p.grad).all() for p in parameters if p.grad is not None]


def _state_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return states[id(optimizer)]


class GradScalerOfPieces(torch.amp.GradScaler):
    """A scaler where each process holds a piece of every gradient: all skip a step if one finds an infinite value.

    Without the private methods that it overrides, processes could disagree: it refuses to be made, and fp16 is lost for
    sharded models.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        missing = [name for name in ("_unscale_grads_", "_maybe_opt_step") if not hasattr(torch.amp.GradScaler, name)]
        if self.is_enabled() and not hasattr(self, "_per_optimizer_states"):
            missing.append("_per_optimizer_states")
        if missing:
            raise gone(f"GradScaler.{missing[0]}", "fp16 with a sharded model", "use bf16")

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """What this process holds of the gradients of an optimizer's parameters."""
        raise NotImplementedError

    def agree(self, found_inf: torch.Tensor) -> None:
        """Make a flag the largest that any process has."""
        raise NotImplementedError

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
                _unscale(pieces, flag, inv_scale.to(device))
            for flag in flags.values():
                found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))
            self.agree(found_inf)
        return {found_inf.device: found_inf}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        # Fused optimizers would unscale by themselves, with flags that are no sharded tensors.
        if self.is_enabled():
            unscale_once(self, optimizer)
        if decides_on_the_device(optimizer):
            state = _state_of(self, optimizer)
            state["stage"] = type(state["stage"]).STEPPED
            result: float | None = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            return result
        return super().step(optimizer, *args, **kwargs)


def _unscale(pieces: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply in place, and set the flag to 1 if a value is infinite; in several passes without torch's own."""
    unscale: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
    if unscale is not None:
        unscale(pieces, found_inf, inv_scale)
        return
    for piece in pieces:
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(piece).all()).to(found_inf.dtype)))
        piece.mul_(inv_scale)
