"""The optimizer a script gets back from `prepare`: it steps when gradients are complete, and only then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from accelerate.comm.tree import recursively_apply
from accelerate.errors import warn
from accelerate.precision.stepping import Stepper, patch_optimizer_step, stepper_for
from accelerate.state import AcceleratorState, GradientState
from accelerate.torch_internals.grad_scaler import has_scaled

__all__ = ["AcceleratedOptimizer", "move_to_device", "patch_optimizer_step"]


def move_to_device(state: Any, device: torch.device) -> Any:
    """Move the tensors of nested optimizer state to a device.

    Args:
        state: the state.
        device: the device.

    Returns:
        The same structure on the device.
    """
    return recursively_apply(lambda tensor: tensor.to(device), state)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wrap a torch optimizer for `Accelerator`, which creates this in `prepare`.

    - `step` and `zero_grad` do nothing while gradients are being accumulated.
    - Steps follow precision and engine (through the gradient scaler under fp16), and it is known whether one was
    skipped.
    - Existing optimizer state is moved to the device.

    Args:
        optimizer: the optimizer.
        device_placement: move existing state to the device.
        scaler: the gradient scaler of fp16.
        stepper: how an engine steps it. By default as torch does.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        stepper: Stepper | None = None,
    ) -> None:
        # Not Optimizer.__init__: groups, state and hooks are those of the wrapped optimizer.
        self._scaler = _enabled(scaler)
        self._stepper = stepper_for(optimizer, self._scaler) if stepper is None else stepper
        self.accelerator_state: AcceleratorState = AcceleratorState()
        self.gradient_state: GradientState = GradientState()
        self.device_placement = device_placement
        # Whether the engine counts micro-batches itself, and is stepped at each of them.
        self.every_micro_batch = False
        # Called after a step, and also when gradients were cleared.
        self.on_gradients_consumed: Callable[[], None] | None = None
        # Called after a step alone, skipped or not.
        self.after_step: tuple[Callable[[], None], ...] = ()
        self._backwards_seen = 0
        self._warned = False
        self._prepared_parameters: Callable[[], tuple[set[int], set[int]]] | None = None
        if device_placement and optimizer.state:
            device = self.accelerator_state.device
            for parameter, values in optimizer.state.items():
                optimizer.state[parameter] = move_to_device(values, device)

    def __getattr__(self, name: str) -> Any:
        # What torch's Optimizer keeps on the instance (hooks, for one), and what other optimizers add.
        if name == "_stepper":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    @property
    def optimizer(self) -> Any:
        """The optimizer inside."""
        return self._stepper.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._stepper = self._stepper.for_other(optimizer)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler that steps go through; None where there is none."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = _enabled(scaler)
        self._stepper = self._stepper.with_scaler(self._scaler)

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process, and not to the optimizer, is found again where it is unpickled.
        dropped = ("accelerator_state", "on_gradients_consumed", "after_step", "_prepared_parameters")
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.accelerator_state = AcceleratorState()
        self.on_gradients_consumed = self._prepared_parameters = None
        self.after_step = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedOptimizer:
        # A copy takes part in the same training: only the optimizer inside is another one.
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.optimizer = copy.deepcopy(self.optimizer, memo)
        twin._prepared_parameters = None
        return twin

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def train(self) -> Any:
        """For optimizers that have two modes, as schedule-free ones do."""
        switch = getattr(self.optimizer, "train", None)
        return switch() if callable(switch) else None

    def eval(self) -> Any:
        """For optimizers that have two modes, as schedule-free ones do."""
        switch = getattr(self.optimizer, "eval", None)
        return switch() if callable(switch) else None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are still being accumulated.

        Args:
            set_to_none: set them to None instead of zero. By default as torch does.
        """
        sync = self.gradient_state.sync_gradients
        if sync or self.every_micro_batch:
            self._stepper.zero_grad(set_to_none, last=sync)
            if sync and self.on_gradients_consumed is not None:
                self.on_gradients_consumed()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, unless gradients are still being accumulated.

        Args:
            closure: reevaluates the model and returns the loss, for optimizers that need it.

        Returns:
            What the wrapped optimizer returns.
        """
        gradient_state = self.gradient_state
        if not gradient_state.sync_gradients:
            if self.every_micro_batch:
                return self._stepper.step(closure, last=False)
            if closure is not None:
                self._say_closure_waits()
            return None
        if self._prepared_parameters is not None:
            self._check_ownership()
        backwards = gradient_state.backwards
        if backwards == self._backwards_seen and closure is None:
            self._check_backward()
        self._backwards_seen = backwards
        result = self._stepper.step(closure)
        for listener in self.after_step:
            listener()
        if self.on_gradients_consumed is not None:
            self.on_gradients_consumed()
        return result

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was infinite or not a number (fp16, `nonfinite`)."""
        return self._stepper.skipped

    @property
    def holds_schedule(self) -> bool:
        """Whether a prepared scheduler waits, since the last step was skipped."""
        return self._stepper.holds_schedule

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for group in self.param_groups for p in group["params"])

    def _check_backward(self) -> None:
        """Warn, or raise under fp16, if the gradients come from a `loss.backward()` without what they need."""
        steps = self.gradient_state.num_steps
        if (steps == 1 and self.scaler is None) or self._warned or not self._has_gradients():
            return
        self._warned = True
        if self.scaler is not None and not has_scaled(self.scaler):
            raise RuntimeError(
                "These gradients come from `loss.backward()`, but fp16 needs a scaled loss: "
                "call `accelerator.backward(loss)` instead."
            )
        missing = "scaled for fp16" if self.scaler is not None else f"divided by the {steps} accumulation steps"
        warn(
            f"`optimizer.step()` was called without `accelerator.backward(loss)` since the last step: a loss that went "
            f"through `loss.backward()` was not {missing}, so these gradients are wrong; "
            "call `accelerator.backward(loss)` instead."
        )

    def _say_closure_waits(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "`optimizer.step(closure)` does not call the closure before the end of an accumulation window, so "
                "what it would compute of the micro-batches before is left out: call `accelerator.backward(loss)` "
                "outside of a closure, or leave gradient_accumulation_steps out."
            )

    def _check_ownership(self) -> None:
        """Warn, at the first step, of parameters that nobody prepared, or whose model was not called as prepared."""
        assert self._prepared_parameters is not None
        known, bypassed = self._prepared_parameters()
        self._prepared_parameters = None
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        if known and mine and known.isdisjoint(map(id, mine)):
            warn(
                f"None of the {len(mine)} parameters of this {type(self.optimizer).__name__} belongs to a model that "
                "was passed to `accelerator.prepare()`: their gradients are not synchronized, and the prepared model "
                "is not trained by it; create the optimizer from the parameters of the model you prepare."
            )
        alone = sum(parameter.grad is not None and id(parameter) in bypassed for parameter in mine)
        if alone:
            warn(
                f"The gradients of {alone} of the {len(mine)} parameters of this {type(self.optimizer).__name__} were "
                f"not averaged over the {self.accelerator_state.num_processes} processes, so each process trains "
                "its own model: call the model that `accelerator.prepare()` returned, not the one it was given."
            )


def _enabled(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    return scaler if scaler is not None and scaler.is_enabled() else None
