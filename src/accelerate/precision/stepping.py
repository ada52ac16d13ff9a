"""How an optimizer takes a step: by itself, or so that it is left out where a gradient is not finite."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from accelerate.torch_internals.grad_scaler import found_inf
from accelerate.torch_internals.optimizers import decides_on_the_device, takes_found_inf


class Stepper:
    """One optimizer's steps, as `AcceleratedOptimizer` asks for them. The base class is the plain case.

    An engine that steps in its own way returns one of its own from `Strategy.stepper`. It is told whether this is the
    `last` micro-batch of a window; others than the last are for engines that keep the window themselves.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None, *, last: bool = True) -> Any:
        """Take one step; returns what the optimizer returns."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool | None = None, *, last: bool = True) -> None:
        """Clear the gradients. None: as the optimizer does by default."""
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            try:
                self.optimizer.zero_grad(set_to_none=set_to_none)
            except TypeError:
                if "set_to_none" in inspect.signature(self.optimizer.zero_grad).parameters:
                    raise
                raise ValueError(
                    f"{type(self.optimizer).__name__}.zero_grad takes no `set_to_none`: leave it out."
                ) from None

    @property
    def skipped(self) -> bool:
        """Whether the last step was left out, as for a gradient that is not finite."""
        return False

    @property
    def holds_schedule(self) -> bool:
        """Whether the schedule is not to move on, since the last step was left out."""
        return self.skipped

    def for_other(self, optimizer: Any) -> Stepper:
        """The same for another optimizer, that comes in place of this one."""
        return type(self)(optimizer)

    def with_scaler(self, scaler: torch.amp.GradScaler | None) -> Stepper:
        """The same through another scaler, or none. Engines that step in their own way keep to it."""
        return stepper_for(self.optimizer, scaler) if type(self) is Stepper else self


class SkippingStepper(Stepper):
    """Leaves a step out when a gradient is not finite."""

    def __init__(self, optimizer: Any, overflow: bool = False) -> None:
        super().__init__(optimizer)
        self._overflow = overflow
        self._found_inf: list[torch.Tensor] = []

    @property
    def skipped(self) -> bool:
        if self._found_inf:
            self._overflow = any(bool(flag) for flag in self._found_inf)
            self._found_inf = []
        return self._overflow

    def flags(self) -> list[torch.Tensor]:
        """On their devices, of which any that is not 0 says that the last step was left out; none where it is known."""
        return [flag for flag in self._found_inf if flag.device.type != "cpu"]


class ScaledStepper(SkippingStepper):
    """Steps through a gradient scaler, which leaves a step out when a gradient is not finite."""

    def __init__(self, optimizer: Any, scaler: torch.amp.GradScaler, overflow: bool = False) -> None:
        super().__init__(optimizer, overflow)
        self.scaler = scaler
        self._accelerate_step_called = False
        # Ours waits for the other optimizers before it updates its factor.
        self._finish: Callable[[], None] = getattr(scaler, "finish_step", scaler.update)
        # Fused optimizers are always called and decide on the device.
        self._told_of_inf = decides_on_the_device(optimizer)
        optimizer.step = patch_optimizer_step(self, optimizer.step)

    def step(self, closure: Callable[[], Any] | None = None, *, last: bool = True) -> Any:
        scaler = self.scaler
        self._accelerate_step_called = False
        result = scaler.step(self.optimizer) if closure is None else scaler.step(self.optimizer, closure)
        self._overflow = not self._accelerate_step_called
        if self._told_of_inf:
            # On the device still: asked for only when somebody wants to know.
            self._found_inf = found_inf(scaler, self.optimizer)
        self._finish()
        return result

    def for_other(self, optimizer: Any) -> ScaledStepper:
        return type(self)(optimizer, self.scaler, self.skipped)

    def with_scaler(self, scaler: torch.amp.GradScaler | None) -> Stepper:
        return stepper_for(self.optimizer, scaler)

    def __reduce__(self) -> tuple[Any, ...]:
        # The optimizer's `step`, which notes that it was called, does not travel with it.
        return type(self), (self.optimizer, self.scaler, self.skipped)


class FiniteStepper(SkippingStepper):
    """Looks at the gradients before each step, and leaves it out where one is not finite.

    look: the strategy's `nonfinite`. A fused optimizer is told of the flag where it is, and nobody waits for it.
    """

    def __init__(
        self, optimizer: Any, look: Callable[[list[torch.Tensor]], torch.Tensor | None], overflow: bool = False
    ) -> None:
        super().__init__(optimizer, overflow)
        self._look = look

    def step(self, closure: Callable[[], Any] | None = None, *, last: bool = True) -> Any:
        if closure is not None:
            raise ValueError(
                "Gradients that a closure computes inside the step cannot be checked before it: leave `nonfinite` "
                "out of the Accelerator, or use an optimizer without a closure."
            )
        optimizer, self._found_inf = self.optimizer, []
        flag = self._look([parameter for group in optimizer.param_groups for parameter in group["params"]])
        if flag is not None and takes_found_inf(optimizer):
            self._found_inf = [flag]
            optimizer.grad_scale, optimizer.found_inf = None, flag  # where a scaler puts them
            try:
                return super().step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        self._overflow = flag is not None and bool(flag)
        return None if self._overflow else super().step()

    @property
    def holds_schedule(self) -> bool:
        # What is known on a device alone is not waited for: a step that is left out now and then may count.
        return not self.flags() and self.skipped

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.optimizer, self._look, self.skipped)

    def for_other(self, optimizer: Any) -> FiniteStepper:
        return type(self)(optimizer, self._look, self.skipped)

    def with_scaler(self, scaler: torch.amp.GradScaler | None) -> Stepper:
        # A scaler looks at the gradients, too.
        return self if scaler is None else ScaledStepper(self.optimizer, scaler)


def stepper_for(optimizer: Any, scaler: torch.amp.GradScaler | None) -> Stepper:
    """What steps an optimizer that no engine steps."""
    return Stepper(optimizer) if scaler is None else ScaledStepper(optimizer, scaler)


def patch_optimizer_step(accelerated_optimizer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `step` of an optimizer so that calls are noted. A scaler does not call it when it skips a step.

    Args:
        accelerated_optimizer: the prepared optimizer, on which the call is noted.
        method: the `step` of the optimizer inside it.

    Returns:
        The wrapped method.
    """

    @functools.wraps(method)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    # A method as the original was: torch's schedulers look for the function in it.
    return types.MethodType(step, accelerated_optimizer.optimizer)
