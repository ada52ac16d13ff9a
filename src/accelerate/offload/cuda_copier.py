"""Copying offloaded weights to an NVIDIA or AMD GPU while it computes."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.devices import page_lock
from accelerate.devices.cuda_lane import CudaLane
from accelerate.devices.staging import Job, Stager, bytes_of
from accelerate.io.stored_tensors import FileRange
from accelerate.offload.locked_files import LockedFiles
from accelerate.offload.locked_memory import SMALL, LockedCopies, PageLocks
from accelerate.offload.module_tensors import has_plain_memory
from accelerate.offload.slot import Slot


class CudaCopier:
    """Copies on a side stream, directly from pinned host memory and pinned pages of files, or through buffers.

    The device memory belongs to the compute stream: it is allocated and freed in the order of that stream, so that
    whatever the forward keeps of a weight (a view of it, or the autograd graph) stays valid. The side stream waits
    until the memory is free, and the compute stream until the copy has arrived.
    """

    lookahead = 2

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = (
            torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        )
        self._lane = CudaLane(self.device)
        self._stager_lane = CudaLane(self.device)
        self._stager = Stager(self._stager_lane)
        self._locks = PageLocks(*page_lock.calls_for(self.device), page_lock.is_locked)
        self._files = LockedFiles(*page_lock.calls_for(self.device, read_only=True))
        self._copies = LockedCopies(self._lane.buffer)
        # When the process ends the memory goes anyway.
        close = weakref.finalize(self, _close, os.getpid(), self._stager, self._lane, self._locks, self._files)
        close.atexit = False

    def __reduce__(self) -> Any:
        return CudaCopier, (self.device,)

    def prepare(self, slots: list[Slot]) -> None:
        sources = [slot.source() for slot in slots]
        in_memory = [source for source in sources if isinstance(source, torch.Tensor) and _is_plain(source)]
        self._copies.add(in_memory)
        self._locks.add(in_memory)

    def start(self, slots: list[Slot]) -> _CudaCopy:
        with torch.cuda.device(self.device), torch.inference_mode(False), torch.no_grad():
            return self._start(slots)

    def _start(self, slots: list[Slot]) -> _CudaCopy:
        tensors: list[torch.Tensor] = []
        direct: list[tuple[torch.Tensor, torch.Tensor]] = []
        staged: list[tuple[torch.Tensor | FileRange, torch.Tensor]] = []
        read: list[FileRange] = []
        later: dict[int, torch.Tensor] = {}
        known: dict[Any, torch.Tensor] = {}
        for slot in slots:
            source = slot.take()
            if isinstance(source, torch.Tensor):
                if not _is_plain(source):
                    later[len(tensors)] = source
                    tensors.append(source)
                    continue
                source = self._small(source) if source.nbytes < SMALL else source.detach()
            key = _identity(source)
            if key not in known:
                known[key] = out = self._room_for(source)
                if isinstance(source, FileRange):
                    locked = self._files.find(source)
                    if locked is None:
                        staged.append((source, out))
                        read.append(source)
                    else:
                        direct.append((locked, bytes_of(out)))
                elif self._is_direct(source):
                    direct.append((source, out))
                else:
                    staged.append((source, out))
            tensors.append(known[key])
        stream = torch.cuda.current_stream()
        free = stream.record_event()
        arrived = None
        if direct:
            with torch.cuda.stream(self._lane.stream):
                self._lane.stream.wait_event(free)
                for source, out in direct:
                    out.copy_(source, non_blocking=True)
                arrived = self._lane.stream.record_event()
        job = None
        if staged:
            self._stager_lane.stream.wait_event(free)
            job = self._stager.bring(staged)
        then = functools.partial(self._files.add, read) if read else None
        return _CudaCopy(tensors, later, stream, arrived, job, then)

    def _small(self, source: torch.Tensor) -> torch.Tensor:
        copied = self._copies.find(source)
        return source.detach() if copied is None else copied

    def _room_for(self, source: torch.Tensor | FileRange) -> torch.Tensor:
        if isinstance(source, FileRange):
            return torch.empty(source.shape, dtype=source.dtype, device=self.device)
        return torch.empty_like(source, device=self.device)

    def _is_direct(self, source: torch.Tensor) -> bool:
        return self._locks.covers(source) or source.nbytes < SMALL or not source.is_contiguous()


def _is_plain(source: torch.Tensor) -> bool:
    return source.device.type == "cpu" and has_plain_memory(source)


def _identity(source: torch.Tensor | FileRange) -> Any:
    """The same value for tensors that are the same one."""
    if isinstance(source, FileRange):
        return source
    return source.data_ptr(), source.shape, source.stride(), source.dtype


@dataclass(eq=False)
class _CudaCopy:
    """Tensors on their way. later: by index, those that are copied when they are asked for.

    then: called as soon as the job is over.
    """

    tensors: list[torch.Tensor]
    later: dict[int, torch.Tensor]
    stream: torch.cuda.Stream
    arrived: torch.cuda.Event | None
    job: Job | None
    then: Callable[[], None] | None

    def wait(self) -> list[torch.Tensor]:
        stream = torch.cuda.current_stream(self.stream.device)
        self._join(stream)
        if self.job is not None and self.job.error is not None:
            raise self.job.error
        if self.then is not None:
            self.then()
            self.then = None
        if stream != self.stream:
            for place, tensor in enumerate(self.tensors):
                if place not in self.later:
                    tensor.record_stream(stream)
        if self.later:
            with torch.inference_mode(False), torch.no_grad():
                for place, source in self.later.items():
                    self.tensors[place] = source.detach().to(stream.device)
        return self.tensors

    def cancel(self) -> None:
        """Stop the copy. Its memory may be reused only when nothing is written to it any more."""
        if self.job is not None:
            self.job.cancelled = True
        self._join(self.stream)

    def _join(self, stream: torch.cuda.Stream) -> None:
        if self.arrived is not None:
            stream.wait_event(self.arrived)
        if self.job is not None:
            self.job.over.wait()
            if self.job.mark is not None:
                stream.wait_event(self.job.mark)


def _close(process: int, stager: Stager, lane: CudaLane, locks: PageLocks, files: LockedFiles) -> None:
    if process != os.getpid():
        return  # a fork of it (the worker of a data loader) has neither its threads nor its CUDA
    stager.close()
    try:
        lane.stream.synchronize()  # copies read the locked memory
    finally:
        locks.close()
        files.close()
