"""A rank that runs out of memory alone: all ranks leave what they do, and go on with one batch size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import find_executable_batch_size
from tests.harness import run_world
from tests.world.batch_size_search import check_outcomes, fail, search
from tests.world.test_launch import TWO, launch, script


def test_one_rank_runs_out_of_memory() -> None:
    check_outcomes(run_world(search, 2))


def sharded_search(version: int) -> tuple[int, float]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(fsdp_plugin=plugin)

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> int:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for step in range(2):
            loss = model(torch.ones(batch_size, 4)).square().mean()
            if accelerator.process_index == 1 and batch_size == 10 and step == 1:
                fail()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    return train(), accelerator.reduce(torch.ones(1)).item()


@pytest.mark.parametrize("version", [1, 2])
def test_one_rank_of_a_sharded_model_runs_out_of_memory(version: int) -> None:
    assert run_world(sharded_search, 2, version) == [(9, 2.0)] * 2


def searches_that_fail() -> tuple[str, str]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    model = accelerator.prepare(nn.Linear(1, 1))

    @find_executable_batch_size(starting_batch_size=8)
    def raises(batch_size: int) -> None:
        if rank == 1:
            raise KeyError("lost")
        accelerator.wait_for_everyone()

    @find_executable_batch_size(starting_batch_size=8)
    def has_a_model_of_before(batch_size: int) -> None:
        if rank == 1 and batch_size == 8:
            fail()
        accelerator.backward(model(torch.ones(1, 1)).sum())

    return error_of(raises), error_of(has_a_model_of_before)


def error_of(function: Any) -> str:
    with pytest.raises((KeyError, RuntimeError)) as caught:
        function()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_searches_that_fail_do_so_on_all_ranks() -> None:
    (raised, outside), (own, other) = run_world(searches_that_fail, 2)
    assert own == "KeyError: 'lost'"
    assert raised == (
        "RuntimeError: The search for a batch size ends here, because it failed on rank 1 (KeyError: 'lost')."
    )
    for rank, text in enumerate((outside, other)):
        assert text.startswith(f"RuntimeError: Rank {rank} has lost the others, after the process group was rebuilt")
        assert "prepare models inside the function" in text


RESTARTED = """
import sys
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig, find_executable_batch_size
# A mesh has groups of its own, which are not made anew.
accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
assert accelerator.torch_device_mesh is not None

@find_executable_batch_size(starting_batch_size=10)
def train(batch_size):
    if accelerator.process_index == 1 and batch_size == 10:
        raise RuntimeError("CUDA out of memory.")
    accelerator.wait_for_everyone()
    return batch_size

sys.stdout.write(f"found {train()} \\n")
"""


def test_a_wait_that_cannot_be_ended_is_said_and_a_restart_goes_on(tmp_path: Path) -> None:
    done = launch(tmp_path, *TWO, "--hang_timeout", "1", "--max_restarts", "1", script(tmp_path, RESTARTED))
    assert done.returncode == 0, done.stderr
    assert re.findall("found [0-9]+ ", done.stdout) == ["found 9 "] * 2
    assert "Rank 1 ran out of memory, while others wait for it in a collective that they cannot leave" in done.stderr
    assert "start the run again with starting_batch_size=9" in done.stderr
