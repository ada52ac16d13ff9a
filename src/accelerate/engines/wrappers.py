"""What a script gets for optimizers and schedulers that an engine steps itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision.stepping import Stepper
from accelerate.scheduler import AcceleratedScheduler


class DoneByEngine(Stepper):
    """The steps of an optimizer that its engine has stepped and cleared already.

    skipped_attribute: what of the engine's optimizer says whether its last step was left out.
    """

    def __init__(self, optimizer: Any, skipped_attribute: str) -> None:
        super().__init__(optimizer)
        self.skipped_attribute = skipped_attribute

    def step(self, closure: Callable[[], Any] | None = None, *, last: bool = True) -> None:
        """Nothing is left to do."""

    def zero_grad(self, set_to_none: bool | None = None, *, last: bool = True) -> None:
        """Nothing is left to do."""

    @property
    def skipped(self) -> bool:
        return bool(getattr(self.optimizer, self.skipped_attribute, False))

    def for_other(self, optimizer: Any) -> DoneByEngine:
        return type(self)(optimizer, self.skipped_attribute)


class OptimizerOfEngine(AcceleratedOptimizer):
    """An optimizer of an engine, which keeps its state where it wants it. Without a stepper, it was stepped already."""

    skipped_attribute: str

    def __init__(
        self, optimizer: Any, device_placement: bool = False, scaler: Any = None, stepper: Stepper | None = None
    ) -> None:
        done = DoneByEngine(optimizer, self.skipped_attribute)
        super().__init__(optimizer, device_placement=False, scaler=None, stepper=stepper or done)


class SchedulerOfEngine(AcceleratedScheduler):
    """A scheduler that was stepped already, and is saved with its engine."""

    saved_by_engine = True

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since the engine has stepped the scheduler.

        Args:
            *args: not used.
            **kwargs: not used.
        """
