"""Copies to an NVIDIA or AMD GPU on a stream of their own, behind the compute."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from accelerate.devices.packing import unpack_


class CudaLane:
    """A stream for copies, and what it and the stream that computes have to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Ahead of what computes: the kernel that puts small tensors in their places would else wait for the last blocks
        # of a large product.
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)

    def enter(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(self.stream)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, outs: list[torch.Tensor], content: torch.Tensor, mark: torch.cuda.Event) -> None:
        """Only for threads that have entered: their stream is this one."""
        if len(outs) == 1:
            outs[0].copy_(content.view(outs[0].shape), non_blocking=True)
        else:
            # All at once, and from there to where each belongs: tensors with one memory in common would not be what a
            # script takes them for when it keeps one of them, resizes it, or writes to it before a backward.
            unpack_(outs, content.to(self.device, non_blocking=True))
        mark.record(self.stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # who waits sleeps: the cores are needed to read
        event.record(self.stream)
        return event

    def on(self) -> AbstractContextManager[None]:
        """A context in which this thread's work, and the memory it takes, belong to this stream."""
        return torch.cuda.stream(self.stream)

    def submitted(self) -> torch.cuda.Event:
        """All work that this thread's stream was given so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def follow(self, work: torch.cuda.Event) -> None:
        """What is sent from now on waits for that work."""
        self.stream.wait_event(work)

    def arrive(self, mark: torch.cuda.Event) -> None:
        """Have this thread's stream wait for what was sent before the mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)
