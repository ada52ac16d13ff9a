"""Copying blocks from a device to the host, by threads that each have a pinned buffer and a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import torch


class BlockCopies:
    """The buffer and the stream of each thread that copies blocks to the host."""

    def __init__(self) -> None:
        self._own = threading.local()

    def buffer(self, size: int, pinned: bool) -> torch.Tensor:
        """The buffer of this thread, reused each time."""
        buffers: dict[bool, torch.Tensor] = self._own.__dict__.setdefault("buffers", {})
        if pinned not in buffers:
            buffers[pinned] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return buffers[pinned]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        streams: dict[torch.device, torch.cuda.Stream] = self._own.__dict__.setdefault("streams", {})
        if device not in streams:
            torch.cuda.set_device(device)  # of this thread, which would else begin with the first one
            streams[device] = torch.cuda.Stream(device)
        return streams[device]

    def copy(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second of each pair to the first, which is on the host. Copies from CUDA run concurrently."""
        used = set()
        for target, source in copies:
            if source.device.type == "cpu":  # by NumPy, since torch would have threads of its own for each
                np.copyto(target.numpy(), source.numpy())
            elif source.device.type != "cuda":
                target.copy_(source)
            else:
                used.add(stream := self._stream(source.device))
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream in used:
            stream.synchronize()


def settle(devices: Iterable[torch.device]) -> None:
    """Wait for the devices, since other streams are going to read their memory."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)
