"""Bringing offloaded weights to a device that has no copies of its own behind the compute: one after the other."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.big_modeling.placeholder import Slot
from accelerate.big_modeling.store import FileRange, map_file
from accelerate.big_modeling.streaming import Copier


class DirectCopier:
    """Copies when the tensors are asked for. On the CPU nothing is copied at all: weights are used where they lie."""

    lookahead = 0

    def __init__(self) -> None:
        self._mapped: dict[str, Any] = {}

    def prepare(self, slots: list[Slot]) -> None:
        """Keep the files mapped from one forward to the next."""
        for slot in slots:
            source = slot.source()
            if isinstance(source, FileRange) and source.nbytes:
                self._mapped[source.path] = map_file(source.path)

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
