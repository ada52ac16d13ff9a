"""Copies of a state in host memory, pinned if they come from a GPU, which is many times faster."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy as shallow_copy
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from accelerate.devices import copies_behind, page_lock
from accelerate.devices.page_lock import Locker, whole_pages
from accelerate.devices.staging import bytes_of
from accelerate.io.disk import threads
from accelerate.io.stored_tensors import view_of

_ALIGNMENT = 64


class HostMemory:
    """Memory for the copies of a save, reused by the next: allocating and pinning takes longer than copying."""

    def __init__(self) -> None:
        self._free: list[_HostBuffer] = []
        self._used: list[_HostBuffer] = []

    @contextmanager
    def one_save(self) -> Iterator[None]:
        """A context for the copies of one save. Those of the previous save are no longer needed."""
        self._free, self._used = self._used, []
        yield
        self._free = []  # what this save had no use for

    def copy(self, content: Any) -> Any:
        """A copy of nested contents, with all tensors in host memory."""
        tensors: dict[Any, torch.Tensor] = {}
        _collect(content, tensors)
        starts, size = {}, 0
        for key, tensor in tensors.items():
            starts[key] = size
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        gpus = {tensor.device for tensor in tensors.values() if copies_behind(tensor.device)}
        memory = self._take(size, next(iter(gpus), None))
        copies = {key: memory.part(starts[key], tensor) for key, tensor in tensors.items()}
        copy([(copies[key], tensor.detach()) for key, tensor in tensors.items() if tensor.device.type == "cpu"])
        for key, tensor in tensors.items():
            if tensor.device.type != "cpu":
                # torch conjugates and negates on the host, at once, also before a copy that goes on behind is there.
                waits = not copies_behind(tensor.device) or tensor.is_conj() or tensor.is_neg()
                copies[key].copy_(tensor.detach(), non_blocking=not waits)
        for device in gpus:
            torch.accelerator.synchronize(device)
        return _rebuilt(content, copies)

    def _take(self, size: int, gpu: torch.device | None) -> _HostBuffer:
        """A buffer of this size, reused from an earlier save if possible. gpu: pin it for copies from this device."""
        pinned = gpu is not None
        found = next((memory for memory in self._free if (memory.size, memory.pinned) == (size, pinned)), None)
        if found is None:
            found = _HostBuffer(size, gpu)
        else:
            self._free.remove(found)
        self._used.append(found)
        return found


class _HostBuffer:
    """Host memory of exactly this size; torch's allocator of pinned memory would take up to twice as much.

    gpu: pin it for copies from this device, and all others. If the system does not allow it, copies are just slower.
    """

    def __init__(self, size: int, gpu: torch.device | None) -> None:
        self.size, self.pinned = size, gpu is not None
        self._memory = torch.empty(size, dtype=torch.uint8) if gpu is None else whole_pages(size)
        if gpu is not None and size:
            locker = Locker(*page_lock.calls_for(gpu))
            # When the process ends the memory goes anyway.
            weakref.finalize(self, _unpin, os.getpid(), locker, self._memory).atexit = False
            locker.add(self._memory.data_ptr(), -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, lambda pinned: None)
            locker.wait()

    def part(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor in a part of this memory that looks as if it had a storage of its own."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        view = memoryview(self._memory.numpy())[start : start + like.nbytes]  # type: ignore[arg-type]
        return torch.frombuffer(view, dtype=torch.uint8).view(like.dtype).reshape(like.shape)


def _unpin(process: int, locker: Locker, memory: torch.Tensor) -> None:
    """Unpin the memory before it is freed. The argument keeps it alive until then."""
    if process == os.getpid():  # a fork of it (the worker of a data loader) has no CUDA
        locker.close()


def copy(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair to the first, in several threads: one thread does not use the full memory bandwidth.

    NumPy does it: torch would start its own threads in each of them, or under a launcher have a single one.
    """
    parts: deque[tuple[Any, Any]] = deque()
    for target, source in copies:
        if not source.is_contiguous() or source.is_conj() or source.is_neg():
            target.copy_(source)
            continue
        to, of = bytes_of(target).numpy(), bytes_of(source).numpy()
        parts += [(to[start : start + _PART], of[start : start + _PART]) for start in range(0, len(of), _PART)]

    def work() -> None:
        with suppress(IndexError):  # until nothing is left
            while True:
                np.copyto(*parts.popleft())

    count = min(_THREADS, len(parts))
    if count:
        with threads(count) as pool:
            for part in [pool.submit(work) for _ in range(count)]:
                part.result()


_PART = 1 << 23
_THREADS = min(8, os.cpu_count() or 1)


def _key(tensor: torch.Tensor) -> Any:
    """The same key for two names of one tensor, so that they stay tied in the copy."""
    return view_of(tensor) or id(tensor)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and type(value).__module__ in ("builtins", "collections")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided one: not sparse, nested, quantized, on meta, or of a subclass."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _collect(value: Any, found: dict[Any, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            found[_key(value)] = value
    elif _is_mapping(value):
        for item in value.values():
            _collect(item, found)
    elif type(value) in (list, tuple):
        for item in value:
            _collect(item, found)


_UNCHANGING = (int, float, bool, str, bytes, type(None))


def _rebuilt(value: Any, copies: dict[Any, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            return copies[_key(value)]
        return value if value.is_meta else value.detach().to("cpu", copy=True)
    if _is_mapping(value):
        twin = shallow_copy(value)
        for name, item in value.items():  # a Counter would add what it is updated with
            twin[name] = _rebuilt(item, copies)
        return twin
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, copies) for item in value)
    return value if type(value) in _UNCHANGING else deepcopy(value)
