"""A rank that runs out of memory alone: all ranks leave what they do, and go on with one batch size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import PartialState, stopping
from accelerate.utils import DistributedDataParallelKwargs, find_executable_batch_size
from tests.harness import run_world
from tests.unit.accelerator.toys import assert_same_everywhere, weights
from tests.world.test_launch import TWO, launch, script

OUT_OF_MEMORY = "CUDA out of memory."


def fail(*_: Any) -> None:
    raise RuntimeError(OUT_OF_MEMORY)


def model_that_fails(where: str) -> nn.Sequential:
    """Runs out of memory in the middle of its forward or backward, or not at all."""
    layers = [nn.Linear(32, 32) for _ in range(4)]
    if where == "forward":
        layers[2].register_forward_pre_hook(fail)
    elif where == "backward":
        layers[1].register_full_backward_hook(fail)
    return nn.Sequential(*layers)


def search() -> dict[str, Any]:
    # A bucket for each layer: in the middle of a backward some are exchanged already, and others are waited for.
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    rank = accelerator.process_index
    # By rank and batch size where memory runs out; 19 fits.
    limits = {
        (0, 36): "forward",
        (1, 36): "begun",
        (1, 32): "forward",
        (0, 28): "backward",
        (1, 25): "gather",
        (0, 22): "end",
        (1, 22): "end",
    }
    sizes = []
    asked = stopping.current(PartialState())

    @find_executable_batch_size(starting_batch_size=36)
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        accelerator.free_memory()
        torch.manual_seed(0)
        where = limits.get((rank, batch_size), "")
        plain = model_that_fails(where)
        data: Any = torch.utils.data.DataLoader(torch.ones(4 * batch_size, 32), batch_size=batch_size)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), data)
        if where == "begun":  # as DDP does for its first bucket
            torch.distributed.all_reduce(torch.ones(1), async_op=True)
            fail()
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            asked.now()
            if where == "gather":
                fail()
            accelerator.gather(loss.detach())
        if where == "end":
            fail()
        assert_same_everywhere(weights(model))
        return batch_size

    found = train()
    total = accelerator.reduce(torch.tensor([rank + 1.0]), "sum").item()
    accelerator.wait_for_everyone()
    return {"found": found, "sizes": sizes, "total": total, "stop": accelerator.should_stop, "passed": asked.passed}


def test_one_rank_runs_out_of_memory() -> None:
    first, second = run_world(search, 2)
    assert first == second
    first.pop("passed")
    assert first == {"found": 19, "sizes": [36, 32, 28, 25, 22, 19], "total": 3.0, "stop": False}


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
        assert "prepare models inside of the function" in text


RESTARTED = """
import sys
import torch
from accelerate import Accelerator
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
