"""A search for a batch size on two ranks that run out of memory at different places; the GPU checks run it, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import PartialState, stopping
from accelerate.utils import DistributedDataParallelKwargs, find_executable_batch_size
from tests.unit.accelerator.toys import assert_same_everywhere, weights

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
            torch.distributed.all_reduce(torch.ones(1, device=accelerator.device), async_op=True)
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
    total = accelerator.reduce(torch.tensor([rank + 1.0], device=accelerator.device), "sum").item()
    accelerator.wait_for_everyone()
    return {"found": found, "sizes": sizes, "total": total, "stop": accelerator.should_stop, "passed": asked.passed}


def check_outcomes(outcomes: list[dict[str, Any]]) -> None:
    """outcomes: what `search` has returned on two ranks."""
    first, second = outcomes
    assert first == second
    first.pop("passed")
    assert first == {"found": 19, "sizes": [36, 32, 28, 25, 22, 19], "total": 3.0, "stop": False}, first
