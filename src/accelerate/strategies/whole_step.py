"""Engines that own the whole step: they make model and optimizer anew, cast, step, and write their own files."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate.strategies.base import Strategy


class WholeStepStrategy(Strategy):
    """The answers that such engines have in common; what each attribute asks is said in `Strategy`."""

    places_models = True
    owns_precision = True
    divides_loss = True
    needs_even_batches = True
    saves_alone = False
    can_roll_back = False
    keeps_parameters = False
    can_leave_steps_out = False

    def weights(self, models: list[nn.Module]) -> list[dict[str, Any]]:
        return []  # the engine writes them itself
