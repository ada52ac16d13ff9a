"""Copying batches to the device while it computes, whether they are in pinned memory or not.

Pinned tensors are copied from where they are. Everything else goes through a few pinned buffers: those of the loop
itself if a batch is small, otherwise those of a `Stager`, whose threads only copy, since the dataset is read in the
loop's thread. The buffers belong to the process, one set for each device, and are reused for as long as it lives.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from ctypes import memmove
from operator import attrgetter
from typing import Any, Protocol

import torch

from accelerate.comm.tree import is_nested, items_of, leaves, replace_leaves, send_to_device
from accelerate.devices import staging
from accelerate.devices.packing import Pack, pack_, packs_of
from accelerate.devices.staging import Buffers, Job, Stager, bytes_of
from accelerate.devices.transfer import BlockingTransfer
from accelerate.torch_internals.data_loader import pin_memory, stop_pinning

# A loader that pins memory pins all of it: a look at the first tensors is enough.
_LOOKED_AT = 2
# Such tensors, if they are few, are on their way sooner than a thread has woken up: CUDA keeps copies of them itself.
_TINY = 1 << 16
_FEW = 16
# So much is read by the loop itself in less time than a thread takes to wake up, and to wait for Python's lock whenever
# it needs it. The loop has so many buffers of that size: it may be some steps ahead of the device.
_AT_ONCE = 1 << 20
_AHEAD = 8
_ALIGNED = 64
# One alone copies less than half of what memory and the bus can do. With two buffers of 4 MiB each.
_READERS = 4
# Of tensors that are their bytes in the memory of the host, and nothing more.
_PLAIN_TYPE = {torch.Tensor}
_looks = attrgetter("is_cpu", "layout", "requires_grad", "is_nested", "is_quantized")
_PLAIN_LOOKS = {(True, torch.strided, False, False, False)}


class StreamLane(staging.Lane, Protocol):
    """A lane for batches: their memory belongs to its stream, and is allocated and freed in its order."""

    device: torch.device

    def on(self) -> AbstractContextManager[Any]:
        """A context in which memory is allocated, and copies are launched, on this lane's stream."""

    def submitted(self) -> Any:
        """Events behind all work that the loop has launched so far."""

    def follow(self, work: Any) -> None:
        """What is sent from now on waits for that work."""

    def arrive(self, mark: Any) -> None:
        """Have what the loop launches from now on wait for what was sent before the mark."""


class Feeder:
    """A lane and its buffers. `buffers` are for the loop itself, while it holds the `guard`."""

    def __init__(self, lane: StreamLane) -> None:
        self.lane = lane
        self.buffers: Buffers = Buffers(lane, _AT_ONCE, _AHEAD)
        self.guard: threading.Lock = threading.Lock()
        self.stager: Stager = Stager(lane, readers=_READERS, name="feeder")


# What is copied at once: a tensor, or many small ones.
_Source = torch.Tensor | Pack


class _Cargo:
    """The tensors of a batch as they are sent.

    sources: tensors, or packs of small ones. places: for each source, the indices of its tensors in the batch.
    """

    def __init__(self, tensors: list[torch.Tensor], packs: list[tuple[Pack, list[int]]]) -> None:
        packed = {place for _, places in packs for place in places}
        alone = [place for place in range(len(tensors)) if place not in packed]
        self.sources: list[_Source] = [*(tensors[place] for place in alone), *(pack for pack, _ in packs)]
        self.places: list[list[int]] = [*([place] for place in alone), *(places for _, places in packs)]

    def unpacked(self, outs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the batch on the device."""
        found: dict[int, torch.Tensor] = {}
        for source, out, places in zip(self.sources, outs, self.places, strict=True):
            found.update(zip(places, source.unpacked(out) if isinstance(source, Pack) else (out,), strict=True))
        return [found[place] for place in range(len(found))]


class _Started:
    """A batch that was fetched, and may be on its way.

    moved: whether it was sent as a whole; otherwise its tensors are replaced by `outs`. cargo: how they are packed in
    `outs`, if some are sent together. pairs: sources that are not read yet, with their targets. mark: an event behind
    the last copy.
    """

    __slots__ = ("batch", "cargo", "job", "mark", "moved", "outs", "pairs")

    def __init__(self, batch: Any, *, moved: bool = False, outs: list[torch.Tensor] | None = None) -> None:
        self.batch = batch
        self.moved = moved
        self.outs = outs
        self.cargo: _Cargo | None = None
        self.pairs: list[tuple[_Source, torch.Tensor]] = []
        self.job: Job | None = None
        self.mark: Any = None

    def taken(self) -> Any:
        """The batch on the device, which from now on belongs to the loop."""
        outs = self.outs
        if outs is not None and self.cargo is not None:
            with torch.inference_mode(False), torch.no_grad():
                outs = self.cargo.unpacked(outs)
        batch = self.batch if outs is None else replace_leaves(self.batch, outs)
        self.batch = self.outs = self.cargo = None
        self.pairs = []
        return batch


class _Room:
    """Memory for the next batch, if it has the same shapes. free: events behind all work on the old content."""

    def __init__(self, outs: list[torch.Tensor], free: Any) -> None:
        self.outs = outs
        self.free = free

    def fits(self, sources: Sequence[_Source]) -> bool:
        return len(sources) == len(self.outs) and all(map(_fits, self.outs, sources))


def _fits(out: torch.Tensor, source: _Source) -> bool:
    if isinstance(source, Pack):
        return out.dtype == source.dtype and out.shape == (source.numel,)
    return out.dtype == source.dtype and out.shape == source.shape and out.stride() == source.stride()


def _room_for(source: _Source) -> int:
    """The size rounded up, so that what follows is aligned for any dtype."""
    return -(-source.nbytes // _ALIGNED) * _ALIGNED


class OverlappedTransfer(BlockingTransfer):
    """Copies a batch during the step of the previous one.

    The lane first waits for all work the loop has submitted so far, so the memory of an earlier batch is never
    overwritten under a running kernel. A batch that is started late would have to wait for the very step that it should
    overlap with, so its memory is allocated before that step.

    Whether memory is pinned takes a call of the driver, so it is checked once, for the first batch.
    """

    def __init__(self, feeder: Feeder, non_blocking: bool) -> None:
        super().__init__(feeder.lane.device, non_blocking)
        self._lane = feeder.lane
        self._stager = feeder.stager
        self._feeder = feeder
        self._pins = False
        self._direct: bool | None = None  # from where batches are; None before the first one was seen
        self._last: _Started | None = None
        self._room: _Room | None = None

    def reads(self, batches: Any) -> None:
        # Pinned by the loader they would be copied twice, and once of that while the loop waits.
        self._pins = stop_pinning(batches)

    def start(self, batch: Any, late: bool = False) -> Any:
        if self._direct is False and _few_and_tiny(_top_items(batch)):
            return self._move(batch)
        tensors = _plain_tensors(batch)
        if tensors is None and self._pins:
            batch = pin_memory(batch)
        if self._direct is None:
            self._decide(leaves(batch) if tensors is None else tensors)
        if tensors is None:
            return self._start_whole(batch)
        if not self._direct and _few_and_tiny(tensors):
            return self._move(batch)
        packs = [] if self._direct else packs_of(tensors, self._stager.small)
        cargo = _Cargo(tensors, packs) if packs else None
        sources = tensors if cargo is None else cargo.sources
        outs = self._take_room(sources)
        self._last = started = _Started(batch, outs=outs)
        started.cargo = cargo
        started.pairs = _pairs(sources, outs)
        if self._direct:
            self._copy(started)
        elif len(sources) <= _FEW and sum(map(_room_for, sources)) <= self._feeder.buffers.size:
            self._copy_at_once(started)
        else:
            started.job = self._stager.bring(started.pairs)
        if late:
            self._room = _Room(self._memory(outs), self._lane.submitted())
        return started

    def _move(self, batch: Any) -> _Started:
        return _Started(send_to_device(batch, self.device, self.non_blocking), moved=True)

    def _decide(self, tensors: list[torch.Tensor]) -> None:
        if tensors:
            pinned = [tensor.is_pinned() for tensor in tensors[:_LOOKED_AT]]
            self._direct = all(pinned)
            # A copy from pageable memory has read its source when it returns: waiting for more than that, as a
            # blocking copy does, would only stop the loop until the device has caught up.
            self.non_blocking = self.non_blocking or not any(pinned)

    def _start_whole(self, batch: Any) -> _Started:
        """Send a batch by its own `to`, if it has one or is more than plain tensors."""
        if not self._direct:
            return _Started(batch)
        self._lane.follow(self._lane.submitted())
        with self._lane.on():
            self._last = started = _Started(send_to_device(batch, self.device, non_blocking=True), moved=True)
        started.mark = self._lane.mark()
        return started

    def _take_room(self, sources: Sequence[_Source]) -> list[torch.Tensor]:
        """Memory for these sources, which the lane writes to once it is no longer in use."""
        room, self._room = self._room, None
        if room is None or not room.fits(sources):
            room = None
            room = _Room(self._memory(sources), self._lane.submitted())
        self._lane.follow(room.free)
        return room.outs

    def _memory(self, sources: Sequence[_Source]) -> list[torch.Tensor]:
        if torch.are_deterministic_algorithms_enabled():
            # torch then fills memory when it is taken, which a step may still read.
            self._lane.follow(self._lane.submitted())
        # Tensors of inference mode could not be written to by other threads.
        with torch.inference_mode(False), self._lane.on():
            return [
                source.memory(self.device) if isinstance(source, Pack) else torch.empty_like(source, device=self.device)
                for source in sources
            ]

    def _copy(self, started: _Started) -> None:
        """Copy the sources directly."""
        with torch.no_grad(), self._lane.on():
            for source, out in started.pairs:
                out.copy_(source.packed() if isinstance(source, Pack) else source, non_blocking=True)
        started.mark = self._lane.mark()

    def _copy_at_once(self, started: _Started) -> None:
        """Copy through one of the loop's own buffers."""
        try:
            # A buffer of inference mode could not be filled outside of it.
            with torch.inference_mode(False), torch.no_grad(), self._lane.on(), self._feeder.guard:
                buffer = self._feeder.buffers.free()
                begin = 0
                for source, out in started.pairs:
                    content = buffer.bytes[begin : begin + out.nbytes]
                    if isinstance(source, Pack):
                        pack_(content.view(source.dtype), source.tensors, source.alike)
                    else:
                        memmove(buffer.bytes.data_ptr() + begin, source.data_ptr(), out.nbytes)
                    self._lane.send([bytes_of(out)], content, buffer.left)
                    begin += _room_for(source)
                started.mark = self._lane.mark()
        except RuntimeError:
            self._copy_after_all(started)
        started.pairs = []

    def _copy_after_all(self, started: _Started) -> None:
        """Copy directly after a failure, such as no memory for buffers. Errors of the device itself are raised here."""
        self._direct = True
        self._copy(started)

    def finish(self, batch: Any) -> Any:
        started: _Started = batch
        if started.job is not None:
            self._send(started, started.job)
        if started.mark is not None:
            self._lane.arrive(started.mark)
        elif not started.moved:
            return super().finish(started.taken())
        return started.taken()

    def _send(self, started: _Started, job: Job) -> None:
        """Until everything has been read and sent."""
        started.job = None
        job.over.wait()
        if job.error is None:
            started.mark = job.mark
        else:
            self._copy_after_all(started)
        started.pairs = []

    def wait(self) -> None:
        # A dataset may reuse its memory for the batch after the next.
        started, self._last = self._last, None
        if started is None:
            return
        if started.job is not None:
            self._send(started, started.job)
        elif started.mark is not None:
            started.mark.synchronize()


def _top_items(batch: Any) -> Collection[Any]:
    """The items of a batch of the usual types, which need no recursion."""
    kind = type(batch)
    return batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,)


def _few_and_tiny(items: Collection[Any]) -> bool:
    if len(items) > _FEW:
        return False
    for item in items:
        if type(item) is not torch.Tensor or item.layout is not torch.strided or item.nbytes > _TINY:
            return False
    return True


def _plain_tensors(batch: Any) -> list[torch.Tensor] | None:
    """The tensors of a batch; None if it has anything else that goes to a device, or tensors that are not plain ones
    in host memory."""
    tensors = list(_top_items(batch))
    if set(map(type, tensors)) != _PLAIN_TYPE:
        if _has_own_way(batch):
            return None
        tensors = leaves(batch)
        if not set(map(type, tensors)) <= _PLAIN_TYPE:
            return None
    # Those that are negated or conjugated only when they are read do not say so where the others are looked at.
    if not set(map(_looks, tensors)) <= _PLAIN_LOOKS or any(map(torch.Tensor.is_neg, tensors)):
        return None
    return None if any(map(torch.Tensor.is_conj, tensors)) else tensors


def _has_own_way(data: Any) -> bool:
    if isinstance(data, torch.Tensor):
        return False
    if (hasattr(data, "to") or hasattr(data, "pin_memory")) and not isinstance(data, type):
        return True
    return is_nested(data) and any(map(_has_own_way, items_of(data)))


def _pairs(sources: Sequence[_Source], outs: list[torch.Tensor]) -> list[tuple[_Source, torch.Tensor]]:
    """Pairs of what is read, and where it goes."""
    return [(_dense(source, out), out) for source, out in zip(sources, outs, strict=True)]


def _dense(source: _Source, out: torch.Tensor) -> _Source:
    """The source, dense and in the memory order of its target."""
    if isinstance(source, Pack) or source.is_contiguous() or source.stride() == out.stride():
        return source
    return torch.empty_like(source).copy_(source)
