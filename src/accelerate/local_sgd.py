"""LocalSGD: let every process train on its own for some steps, then average the models."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from accelerate.comm import current
from accelerate.errors import NotYetSupported


class LocalSGD:
    """Train without synchronizing gradients inside the block, and average parameters over the ranks now and then.

    Call `step()` after each optimizer step.

    Args:
        accelerator: the Accelerator.
        model: the prepared model.
        local_sgd_steps: the number of steps between two averages.
        enabled: False does nothing.
    """

    def __init__(self, accelerator: Any, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps is {local_sgd_steps}: it must be at least 1.")
        self.enabled = enabled and accelerator.use_distributed
        if self.enabled and accelerator._stops_at_nonfinite is not None:
            raise ValueError(
                'Under LocalSGD each process has its own gradients, but nonfinite="stop" needs the same ones on '
                'all of them: pass nonfinite="skip" to the Accelerator, or leave it out.'
            )
        strategy = accelerator._strategy
        if self.enabled and not strategy.saves_alone:
            raise NotYetSupported(
                f"LocalSGD with {type(strategy).__name__}, whose processes hold shards of a model and not copies "
                "that can be averaged,",
                "leave it out, or train with DDP.",
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps: int = 0
        self._no_sync: AbstractContextManager[Any] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(kind, error, traceback)
            self._no_sync = None
            # After an error the other processes may not be here any more.
            if error is None:
                self._average()

    def step(self) -> None:
        """Count one optimizer step, and average the models when it is time."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        current().average([parameter.data for parameter in self.model.parameters() if parameter.requires_grad])
