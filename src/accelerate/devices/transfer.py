"""Copying batches to the device."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.comm.tree import send_to_device


class Transfer:
    """Leaves batches where they are.

    `start` is called as soon as a batch has been fetched, one ahead of the loop; `finish`, once, when the loop asks for
    it. late: the batch is started only after the loop has finished the previous one, and another one will follow.
    """

    def reads(self, batches: Any) -> None:
        """Called with the iterator of torch's loader, before any batch is fetched."""

    def start(self, batch: Any, late: bool = False) -> Any:
        return batch

    def finish(self, batch: Any) -> Any:
        return batch

    def wait(self) -> None:
        """Return when the source of the last started batch is no longer needed."""


class BlockingTransfer(Transfer):
    """Copies a batch when the loop asks for it."""

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self.device = device
        self.non_blocking = non_blocking

    def finish(self, batch: Any) -> Any:
        return send_to_device(batch, self.device, self.non_blocking)


class CpuTransfer(BlockingTransfer):
    """Copies to the CPU, where batches nearly always are already."""

    def finish(self, batch: Any) -> Any:
        kind = type(batch)
        for value in batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,):
            if type(value) is not torch.Tensor or not value.is_cpu:
                return super().finish(batch)
        return batch
