"""Pinned copies, with a stand-in for the CUDA runtime."""

from __future__ import annotations

import contextlib
import gc
import mmap
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.io import host_memory

GPU = torch.device("cuda", 0)


class Runtime:
    """What CUDA notes: which memory is registered, and in which threads it was asked to do so."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse
        self.registered: dict[int, int] = {}
        self.threads: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.threads.add(threading.get_ident())
        assert size > 0, "which it refuses"
        if self.refuse:
            return 1
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.threads.add(threading.get_ident())
        del self.registered[address]
        return 0


@pytest.fixture(params=[False, True], ids=["granted", "refused"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(refuse=request.param)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


def take(memory: host_memory.HostMemory, size: int) -> Any:
    return memory._take(size, GPU)


def test_the_calling_thread_never_pins(runtime: Runtime) -> None:
    """A refusal stays behind as the last error of the thread that asked, and its next kernel would raise it."""
    memory = host_memory.HostMemory()
    with memory.one_save():
        part = take(memory, 1000).part(64, torch.ones(5))
        part.copy_(torch.arange(5.0))
    assert part.tolist() == [0, 1, 2, 3, 4]
    assert bool(runtime.registered) is not runtime.refuse
    del memory, part
    gc.collect()
    assert runtime.registered == {}
    assert runtime.threads and threading.get_ident() not in runtime.threads


def test_memory_is_pinned_once_and_used_again(runtime: Runtime) -> None:
    memory = host_memory.HostMemory()
    found = []
    for _ in range(3):
        with memory.one_save():
            found.append(take(memory, 1000))
    assert len({id(each) for each in found}) == 1 and len(runtime.registered) == (not runtime.refuse)
    with memory.one_save():
        take(memory, 2000)
    del found
    gc.collect()
    assert len(runtime.registered) == (not runtime.refuse), "that of the size before is given back"


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 100_000])
def test_nothing_else_lies_in_pinned_pages(runtime: Runtime, size: int) -> None:
    """CUDA refuses to copy what is pinned in part: a tensor that reaches into such a page, say."""
    taken = [host_memory.HostMemory() for _ in range(8)]
    for memory in taken:
        take(memory, size)
    assert all(start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0 for start, length in runtime.registered.items())
    others = [torch.empty(length, dtype=torch.uint8) for length in (8, 100, 3000, 100_000) for _ in range(50)]
    for start, length in runtime.registered.items():
        for other in others:
            assert other.data_ptr() + other.nbytes <= start or start + length <= other.data_ptr()


def test_a_save_at_the_end_of_a_program_has_its_copies() -> None:
    """From Python 3.12 on no thread can be started by then: the memory is not pinned."""
    code = """
import atexit, torch
from accelerate.io import host_memory
from accelerate.devices import page_lock

page_lock.lock = lambda *args: False

def save():
    memory = host_memory.HostMemory()
    with memory.one_save():
        print(memory._take(100, torch.device("cuda")).part(0, torch.ones(2)).fill_(3).tolist())

atexit.register(save)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[3.0, 3.0]\n" and not done.stderr, done.stderr
