"""Copies to an NVIDIA or AMD GPU on a separate stream, overlapping with compute."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from accelerate.devices.packing import unpack_


class CudaLane:
    """A stream for copies, and the events that it and the compute stream wait for.

    stream: the stream to copy on; by default a new one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        # Ahead of what computes: the kernel that puts small tensors in their places would else wait for the last blocks
        # of a large product.
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1) if stream is None else stream
        self._loops: dict[int, torch.cuda.Stream] = {}  # on which loops compute: nearly always one
        self._sizes: dict[int, int] = {}  # of buffers, by address
        self._aside: dict[int, torch.Tensor] = {}  # memory of the device, by the address of the buffer it belongs to

    def enter(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(self.stream)

    def buffer(self, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._sizes[buffer.data_ptr()] = size
        return buffer

    def send(self, outs: list[torch.Tensor], content: torch.Tensor, mark: torch.cuda.Event) -> None:
        """Only for threads that have called `enter`: this is their current stream."""
        if len(outs) == 1:
            outs[0].copy_(content.view(outs[0].shape), non_blocking=True)
        else:
            # All at once, and from there to where each belongs: tensors with one memory in common would not be what a
            # script takes them for when it keeps one of them, resizes it, or writes to it before a backward.
            unpack_(outs, self._beside(content).copy_(content, non_blocking=True))
        mark.record(self.stream)

    def _beside(self, content: torch.Tensor) -> torch.Tensor:
        """Device memory for the content of a buffer, allocated once and kept.

        Memory from this stream's own pool could belong to a batch that a step is still reading.
        """
        address = content.data_ptr()
        size = self._sizes[address]
        kept = self._aside.get(address)
        if kept is None or len(kept) < size:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                kept = torch.empty(size, dtype=torch.uint8, device=self.device)
            torch.cuda.synchronize(self.device)  # whoever had it before is through with it
            self._aside[address] = kept
        return kept[: content.nbytes].view(content.dtype)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # who waits sleeps: the cores are needed to read
        event.record(self.stream)
        return event

    def on(self) -> AbstractContextManager[None]:
        """A context in which this thread launches work and allocates memory on this stream."""
        return torch.cuda.stream(self.stream)

    def submitted(self) -> list[torch.cuda.Event]:
        """Events behind all work on the streams of loops so far: memory of one loop may be reused by another."""
        stream = torch.cuda.current_stream(self.device)
        self._loops[stream.cuda_stream] = stream
        return [each.record_event() for each in self._loops.values()]

    def follow(self, work: list[torch.cuda.Event]) -> None:
        """Have everything that is sent from now on wait for that work."""
        for event in work:
            self.stream.wait_event(event)

    def arrive(self, mark: torch.cuda.Event) -> None:
        """Have this thread's stream wait for what was sent before the mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)
