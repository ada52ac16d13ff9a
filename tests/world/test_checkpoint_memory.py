"""How much memory a save takes beyond what the run has already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from tests.harness import run_world
from tests.harness.memory import needs_peak, peak
from tests.unit.accelerator.toys import ALONE

MIB = 1 << 20
TENSOR, STATE = 4 * MIB, 96 * MIB


def _growths(folder: str) -> dict[str, int]:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(model(torch.ones(1, 1024)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(folder)  # what is imported and made once

    def behind() -> None:
        accelerator.save_state(folder, async_save=True)
        accelerator.wait_for_checkpoint()

    found = {"save": peak(lambda: accelerator.save_state(folder))}
    found["torch files"] = peak(lambda: accelerator.save_state(folder, safe_serialization=False))
    found["behind"] = peak(behind)
    found["behind again"] = peak(behind)
    found["load"] = peak(lambda: accelerator.load_state(folder))
    return found


@needs_peak
@pytest.mark.parametrize("processes", [1, 2])
def test_one_copy_at_most(tmp_path: Path, processes: int) -> None:
    env = ALONE if processes == 1 else None
    found = run_world(_growths, processes, str(tmp_path / "x"), env=env)
    for rank, sizes in enumerate(found):
        assert sizes["save"] < TENSOR and sizes["torch files"] < TENSOR, sizes  # from where it is
        if rank == 0:
            assert STATE * 0.9 < sizes["behind"] < STATE + 2 * TENSOR, sizes
        else:
            assert sizes["behind"] < TENSOR  # it writes next to nothing
        assert sizes["behind again"] < TENSOR  # the same memory
        assert sizes["load"] < STATE + TENSOR, sizes  # files are mapped, and go into the memory that is there


def _in_other_order(folder: str) -> dict[str, int]:
    """Models whose values are in memory in another order than in a file."""
    accelerator = Accelerator(cpu=True)
    nets = [nn.Sequential(*(nn.Conv2d(512, 256, 3, bias=False) for _ in range(4))) for _ in range(3)]  # 4.5 MiB each
    models = accelerator.prepare(*(net.to(memory_format=torch.channels_last) for net in nets))
    accelerator.save_state(folder)

    def behind() -> None:
        accelerator.save_state(folder, async_save=True)
        accelerator.wait_for_checkpoint()

    found = {"save": peak(lambda: accelerator.save_state(folder))}
    found["one model"] = peak(lambda: accelerator.save_model(models[0], folder + "-model"))
    found["behind"] = peak(behind)
    return found


@needs_peak
def test_what_is_in_another_order(tmp_path: Path) -> None:
    [sizes] = run_world(_in_other_order, 1, str(tmp_path / "x"), env=ALONE)
    model = 18 * MIB
    # Some blocks at a time.
    assert sizes["save"] < model and sizes["one model"] < model, sizes
    assert sizes["behind"] < 3 * model + 2 * TENSOR, sizes
