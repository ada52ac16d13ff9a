"""Copying data to a device through pinned buffers, if the device cannot copy it from where it is.

    file or memory --readers, several at once--> buffers --the bus--> device

Each reader is a thread that handles as much as fits into a buffer, a part of a large tensor or many small ones. It
fills one of its buffers, sends it, and takes the next part. It has two buffers: while one is being sent, the other is
filled. Batches, offloaded weights and the weights of checkpoints are copied in this way.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from accelerate.devices.packing import MANY, SMALL, Pack, pack_

# Small enough that all readers have work while two blocks are on their way: one alone is far slower than the bus.
PART = 4 * 1024 * 1024
# So many parts' worth of small tensors is read by one thread at once. If several shared it, each would wait for the GIL
# many times, and so would the loop, which needs it for every single tensor.
_PARTS_OF_A_PACK = 4
# A few even where there are fewer cores: a reader may wait for the disk.
STAGERS = max(4, min(16, os.cpu_count() or 1))
_BUFFERS = 2  # of each reader
# Seconds to wait for a thread at the end of the process: one may wait for a device that hangs.
_LEAVING = 2.0


class Lane(Protocol):
    """How buffers are sent to the device: in order, whichever thread sends them."""

    def enter(self) -> None:
        """Called once by each thread that is going to send."""

    def buffer(self, size: int) -> torch.Tensor:
        """Allocate pinned memory."""

    def send(self, outs: list[torch.Tensor], content: torch.Tensor, mark: Any) -> None:
        """Start copying `content` to these tensors, one after another, and record the mark behind it."""

    def mark(self) -> Any:
        """An event behind everything that was sent so far; its `synchronize` waits for that."""


class PlainLane:
    """A lane to the host, or to a device without asynchronous copies: `send` returns when the data is there."""

    def enter(self) -> None:
        """Nothing has to be set up."""

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def send(self, outs: list[torch.Tensor], content: torch.Tensor, mark: Any) -> None:
        out, *more = outs
        assert not more
        out.copy_(content.view(out.shape))

    def mark(self) -> _There:
        return _There()


class _There:
    def synchronize(self) -> None:
        """All that was sent is there."""


def lane_of_caller(device: torch.device) -> Lane:
    """A lane on the caller's current stream, if the device has streams."""
    if device.type != "cuda":
        return PlainLane()
    from accelerate.devices.cuda_lane import CudaLane

    stream = torch.cuda.current_stream(device)
    return CudaLane(stream.device, stream)  # with its number, which the device may have been given without


class Stored(Protocol):
    """A stored tensor, whose bytes several threads read at once."""

    @property
    def nbytes(self) -> int: ...

    def read(self, view: memoryview, start: int, files: OpenFiles) -> None:
        """Read its bytes from `start` on into memory. Raises an OSError if they cannot be read."""


class InFile(Protocol):
    """A stored tensor in a file. file: pins that very file; None for whichever has this path."""

    @property
    def path(self) -> str: ...

    @property
    def file(self) -> object | None: ...

    def open(self) -> int | None:
        """A handle to read from; None where the file has lost its name."""


class OpenFiles:
    """Files that are read by several threads, each opened once."""

    def __init__(self) -> None:
        self._handles: dict[tuple[str, int], int | None] = {}
        self._guard = threading.Lock()

    def open(self, place: InFile) -> int | None:
        """A handle to read from; None where the file has lost its name."""
        key = place.path, id(place.file)
        with self._guard:
            if key not in self._handles:
                self._handles[key] = place.open()
            return self._handles[key]

    def close(self) -> None:
        for handle in self._handles.values():
            if handle is not None:
                os.close(handle)
        self._handles.clear()


class HostTensor:
    """A dense tensor in memory, or in a mapped file."""

    path = ""  # it is in no file

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.nbytes: int = tensor.numel() * tensor.element_size()

    @cached_property
    def _bytes(self) -> Any:
        return bytes_of(self.tensor).numpy()

    def mapped(self) -> torch.Tensor:
        return self.tensor

    def read(self, view: memoryview, start: int, files: OpenFiles) -> None:
        # By NumPy, which lets go of Python's lock: several run at once.
        np.copyto(np.frombuffer(view, np.uint8), self._bytes[start : start + len(view)])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, in any memory order, as bytes."""
    # Not `view(-1)`: a single element may keep the stride of the row it was taken from, which no view of bytes has.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Job:
    """A set of tensors that are copied together.

    over: set as soon as everything has been sent, or given up. mark: an event behind the last copy, from then on.
    error: what went wrong. cancelled: set it if the tensors are no longer needed; the job then ends soon.
    """

    def __init__(self) -> None:
        self.over: threading.Event = threading.Event()
        self.mark: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.files = OpenFiles()
        self._left = 0
        self._guard = threading.Lock()

    def expect(self, parts: int) -> None:
        self._left = parts
        if parts == 0:
            self.end()

    def count_down(self) -> bool:
        """Count a finished part. Returns whether it was the last one."""
        with self._guard:
            self._left -= 1
            return self._left == 0

    def end(self) -> None:
        self.files.close()
        self.over.set()


class Task(Protocol):
    """A unit of work of a job, for one thread."""

    @property
    def job(self) -> Job: ...

    def bring(self, lane: Lane, free: Free) -> None:
        """Read it, and send it."""


class _TensorPart(NamedTuple):
    """A part of a tensor that fits into a buffer. out: its bytes on the device."""

    job: Job
    source: Stored
    start: int
    out: torch.Tensor

    def bring(self, lane: Lane, free: Free) -> None:
        buffer = free()
        view, content = buffer.part(len(self.out))
        self.source.read(view, self.start, self.job.files)
        lane.send([self.out], content, buffer.left)


class _Bundle(NamedTuple):
    """Many small tensors of one dtype, which share a buffer. If each were a piece, the threads would spend their time
    waiting for the GIL."""

    job: Job
    sources: list[torch.Tensor]
    outs: list[torch.Tensor]
    size: int
    alike: bool | None = None

    def bring(self, lane: Lane, free: Free) -> None:
        buffer = free(self.size)
        content = buffer.bytes[: self.size].view(self.sources[0].dtype)
        pack_(content, self.sources, self.alike)
        lane.send(self.outs, content, buffer.left)


class Buffer:
    def __init__(self, lane: Lane, size: int) -> None:
        self.bytes: torch.Tensor = lane.buffer(size)
        self.view: memoryview = self.bytes.numpy().data
        self.left: Any = lane.mark()  # behind the copy of what it held last

    def part(self, size: int) -> tuple[memoryview, torch.Tensor]:
        """Its first bytes, as memory to fill and as a tensor to send."""
        whole = size == len(self.view)  # of which no views have to be made
        return (self.view, self.bytes) if whole else (self.view[:size], self.bytes[:size])


class Buffers:
    """A few buffers of one thread, used in turn, and allocated when they are first needed."""

    def __init__(self, lane: Lane, size: int, count: int) -> None:
        self.size = size
        self._lane = lane
        self._count = count
        self._made: deque[Buffer] = deque()

    def free(self, size: int = 0) -> Buffer:
        """The buffer that was sent first, as soon as it can be filled. size: that it must have at least."""
        if len(self._made) < self._count:
            self._made.append(Buffer(self._lane, max(size, self.size)))
        self._made.rotate()
        self._made[0].left.synchronize()
        if len(self._made[0].view) < size:
            self._made[0] = Buffer(self._lane, size)
        return self._made[0]


class Free(Protocol):
    """Returns a buffer of the calling thread that has this size at least, as soon as it can be filled."""

    def __call__(self, size: int = 0) -> Buffer: ...


_Pair = tuple[torch.Tensor | Stored | Pack, torch.Tensor]


class Stager:
    """Copies tensors through buffers. Its threads start with the first job, and end with `close` or the process."""

    def __init__(self, lane: Lane, part: int = PART, readers: int = STAGERS, name: str = "offload-reader") -> None:
        self._lane = lane
        self._name = name
        self._size = part
        self._count = readers
        self._todo: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._leaving = False

    @property
    def small(self) -> int:
        """The size in bytes up to which tensors share a buffer."""
        return min(SMALL, self._size)

    def bring(self, pairs: Sequence[_Pair]) -> Job:
        """Start filling tensors on the device, each from its source."""
        job = Job()
        return self.begin(job, self._parts(job, pairs))

    def begin(self, job: Job, parts: Sequence[Task]) -> Job:
        """Start the parts of a job."""
        job.expect(len(parts))
        for part in parts:
            self._todo.put(part)
        if parts and not self._threads:
            self._start_threads()
        return job

    def _parts(self, job: Job, pairs: Sequence[_Pair]) -> list[Task]:
        parts: list[Task] = []
        small: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        most = self.small
        for source, out in pairs:
            if isinstance(source, Pack):
                parts += self._packed(job, source, out)
                continue
            size = source.nbytes
            if size <= most and isinstance(source, torch.Tensor):
                small.append((source, out, size))
            else:
                parts += self._pieces(job, source, out)
        if len(small) >= MANY:
            return [*parts, *self._bundles(job, small)]
        for source, out, _ in small:
            parts += self._pieces(job, source, out)
        return parts

    def _pieces(self, job: Job, source: torch.Tensor | Stored, out: torch.Tensor) -> list[_TensorPart]:
        if not source.nbytes:
            return []
        stored = HostTensor(source) if isinstance(source, torch.Tensor) else source
        return [
            _TensorPart(job, stored, self._size * i, piece) for i, piece in enumerate(bytes_of(out).split(self._size))
        ]

    def _packed(self, job: Job, pack: Pack, out: torch.Tensor) -> list[_Bundle]:
        spans = _spans(pack.sizes, _PARTS_OF_A_PACK * self._size)
        pieces = out.split([size // pack.dtype.itemsize for _, _, size in spans])
        return [
            _Bundle(job, pack.tensors[begin:end], [piece], size, pack.alike)
            for (begin, end, size), piece in zip(spans, pieces, strict=True)
        ]

    def _bundles(self, job: Job, small: list[tuple[torch.Tensor, torch.Tensor, int]]) -> list[_Bundle]:
        bundles: list[_Bundle] = []
        by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
        for item in small:
            by_dtype.setdefault(item[0].dtype, []).append(item)
        for items in by_dtype.values():
            sources, outs, sizes = map(list, zip(*items, strict=True))
            spans = _spans(sizes, self._size)
            bundles += [_Bundle(job, sources[begin:end], outs[begin:end], size) for begin, end, size in spans]
        return bundles

    def _start_threads(self) -> None:
        for _ in range(self._count):
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # the process has too many, or ends: those that have started do the work
                self._threads.pop()
                if not self._threads and not isinstance(self._lane, PlainLane):
                    raise
                break
        if not self._threads:  # the caller does it
            self._todo.put(None)
            self._run()
            return
        # A thread that is inside of torch when Python ends takes the process down with it.
        atexit.register(self._leave)

    def _leave(self) -> None:
        """End the threads after their current parts. Jobs that still wait for a part are ended with an error."""
        self._leaving = True
        self.close(seconds=_LEAVING)
        self._leaving = False

    def close(self, seconds: float | None = None) -> None:
        """End the threads after what they have started. seconds: how long to wait for each of them."""
        atexit.unregister(self._leave)
        for _ in self._threads:
            self._todo.put(None)
        # A reader may be where the garbage is collected that this belongs to: it cannot wait for itself.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                if _has_begun(thread):
                    thread.join(seconds)
        self._threads = []

    @torch.no_grad()
    def _run(self) -> None:
        self._lane.enter()
        buffers = Buffers(self._lane, self._size, _BUFFERS)
        while (part := self._todo.get()) is not None:
            job = part.job
            try:
                if self._leaving:
                    job.error = RuntimeError("The process ends, and copies nothing any more.")
                if not job.cancelled and job.error is None:
                    part.bring(self._lane, buffers.free)
            except Exception as error:
                job.error = error
            # A thread that waits for work must not keep memory of the device.
            del part
            if job.count_down():
                self._end(job)
            del job

    def _end(self, job: Job) -> None:
        try:
            # Not that of the last part: another reader may have sent its part after that one and been faster here.
            job.mark = self._lane.mark()
        except Exception as error:
            job.error = error
        job.end()


def _spans(sizes: list[int], most: int) -> list[tuple[int, int, int]]:
    """Runs of tensors that have at most so many bytes together: the first, the one behind the last, and their size."""
    spans = []
    begin = filled = 0
    for end, size in enumerate(sizes):
        if filled + size > most:
            spans.append((begin, end, filled))
            begin, filled = end, 0
        filled += size
    return [*spans, (begin, len(sizes), filled)]


def run_tasks(job: Job, tasks: Sequence[Task], lane: Lane, size: int, most: int, name: str) -> None:
    """Run all tasks of a job in at most `most` threads, and wait. After an error, nothing more is started.

    size: that of each thread's two buffers.
    """
    if len(tasks) == 1 and isinstance(lane, PlainLane):  # which is not worth a thread
        try:
            tasks[0].bring(lane, Buffers(lane, size, 1).free)
        finally:
            job.end()
        return
    stager = Stager(lane, size, min(most, len(tasks)), name)
    try:
        stager.begin(job, tasks)
        while not job.over.wait(0.1):  # an interrupt right before a wait does not end it
            pass
    except BaseException:
        job.cancelled = True
        raise
    finally:
        stager.close()
        job.files.close()
    if job.error is not None:
        raise job.error
    if tasks:
        job.mark.synchronize()


def _has_begun(thread: threading.Thread) -> bool:
    """Whether a thread runs, or has run. One whose start was interrupted may begin a moment later, or never."""
    for _ in range(100):
        if thread.ident is not None:
            return True
        time.sleep(0.01)
    return False
