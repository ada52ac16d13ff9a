"""Bringing offloaded weights to a device that has no copies of its own behind the compute: one after the other."""

from __future__ import annotations

import torch

from accelerate.big_modeling.slot import Slot
from accelerate.big_modeling.streaming import Copier


class DirectCopier:
    """Copies when the tensors are asked for. On the CPU nothing is copied at all: weights are used where they lie."""

    lookahead = 0

    def prepare(self, slots: list[Slot]) -> None:
        """Find the files, which are kept from then on."""
        for slot in slots:
            slot.source()

    def start(self, slots: list[Slot]) -> _Direct:
        return _Direct(slots)


class _Direct:
    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots

    def wait(self) -> list[torch.Tensor]:
        return [slot.value() for slot in self._slots]

    def cancel(self) -> None:
        """Nothing has begun."""


def copier_for(device: torch.device) -> Copier:
    """What copies best to a device."""
    if device.type == "cuda":
        from accelerate.big_modeling.cuda_copier import CudaCopier

        return CudaCopier(device)
    return DirectCopier()
