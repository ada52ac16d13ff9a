"""Pinned copies of a state on a GPU: see checks.py."""

from __future__ import annotations

import gc
from unittest import mock

import torch

from tests.gpu.checks import check


@check
def a_refusal_to_pin_is_not_raised_by_the_next_kernel() -> None:
    from accelerate.devices import page_lock
    from accelerate.io.host_memory import HostMemory

    real, refusals = page_lock.lock, []

    def refused(device: torch.device, flags: int, address: int, size: int) -> bool:
        refusals.append(real(device, flags, address, 2**60))
        return refusals[-1]

    weight = torch.arange(1000.0, device="cuda")
    with mock.patch("accelerate.devices.page_lock.lock", refused):
        memory = HostMemory()
        with memory.one_save():
            copies = memory.copy({"weight": weight})
    assert refusals == [False], refusals
    assert torch.equal((weight + 1).cpu(), copies["weight"] + 1)
    torch.cuda.synchronize()


@check
def memory_beside_pinned_copies_can_be_copied() -> None:
    """CUDA refuses to copy what is pinned in part."""
    from accelerate.io.host_memory import HostMemory

    others, memories = [], []
    for turn, size in enumerate((100, 3000, 5000, 70_000, 200_000) * 4):
        memory = HostMemory()
        with memory.one_save():
            copy = memory.copy({"x": torch.full((size,), turn, dtype=torch.uint8, device="cuda")})["x"]
        assert copy.is_pinned() and copy.unique().tolist() == [turn]
        memories.append(memory)
        others += [torch.full((length,), turn, dtype=torch.uint8) for length in (50, 4000, 9000, 100_000)]
    assert all(torch.equal(other.cuda().cpu(), other) for other in others)
    del memory, memories, copy
    gc.collect()
    assert all(torch.equal(other.cuda().cpu(), other) for other in others)
