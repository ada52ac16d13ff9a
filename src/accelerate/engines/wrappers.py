"""What a script gets for optimizers and schedulers that an engine steps itself: its own calls do nothing."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler


class OptimizerOfEngine(AcceleratedOptimizer):
    """An optimizer that was stepped and cleared already."""

    # The attribute of the engine's optimizer that says whether its last step was left out.
    skipped_attribute: str

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def step(self) -> None:  # type: ignore[override]
        """Nothing is left to do."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing is left to do."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out, as for gradients that are not finite."""
        return bool(getattr(self.optimizer, self.skipped_attribute, False))


class SchedulerOfEngine(AcceleratedScheduler):
    """A scheduler that was stepped already."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""
