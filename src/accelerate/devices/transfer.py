"""Bringing batches to the device."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.comm.tree import leaves, send_to_device

# A loader that pins memory pins all of it: a look at the first tensors is enough.
_LOOKED_AT = 2


class Transfer:
    """Batches stay where they are.

    `start` is called as soon as a batch has been fetched, one ahead of the loop; `finish` when the loop asks for it.
    """

    def start(self, batch: Any) -> Any:
        return batch

    def finish(self, batch: Any) -> Any:
        return batch

    def wait(self) -> None:
        """Return when the source of the last started batch is no longer needed."""


class BlockingTransfer(Transfer):
    """Copied when the loop asks for it."""

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self.device = device
        self.non_blocking = non_blocking

    def finish(self, batch: Any) -> Any:
        return send_to_device(batch, self.device, self.non_blocking)


class CpuTransfer(BlockingTransfer):
    """To the CPU, where batches nearly always are already."""

    def finish(self, batch: Any) -> Any:
        kind = type(batch)
        for value in batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,):
            if type(value) is not torch.Tensor or not value.is_cpu:
                return super().finish(batch)
        return batch


class OverlappedTransfer(BlockingTransfer):
    """Copied on a side stream behind the compute, where batches lie in pinned memory.

    The side stream first waits for all work the loop has submitted so far, so a copy runs beside the step of the
    previous batch and memory that a former batch has given back is never overwritten under a running kernel. Whether
    memory is pinned costs a question to the driver: it is asked once, of the first batch.
    """

    def __init__(self, device: torch.device, non_blocking: bool, stream: Any) -> None:
        super().__init__(device, non_blocking)
        self._stream = stream
        self._module = torch.get_device_module(device)
        self._decided = self._ahead = False
        self._copied: Any = None

    def start(self, batch: Any) -> Any:
        """The batch as it is, or the one on its way to the device and the event of its arrival."""
        if not self._decided:
            self._decide(batch)
        if not self._ahead:
            return batch
        self._stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._stream):
            moved = send_to_device(batch, self.device, non_blocking=True)
        self._copied = self._stream.record_event()
        return moved, self._copied

    def _decide(self, batch: Any) -> None:
        pinned = [tensor.is_pinned() for tensor in leaves(batch)[:_LOOKED_AT]]
        self._decided, self._ahead = True, bool(pinned) and all(pinned)
        # A copy from pageable memory has read its source when it returns: waiting for more than that, as a blocking
        # copy does, would only stop the loop until the device has caught up.
        self.non_blocking = self.non_blocking or (bool(pinned) and not any(pinned))

    def finish(self, batch: Any) -> Any:
        if not self._ahead:
            return super().finish(batch)
        moved, arrived = batch
        self._module.current_stream(self.device).wait_event(arrived)
        return moved

    def wait(self) -> None:
        # A dataset may reuse its pinned buffers for the batch after the next.
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
