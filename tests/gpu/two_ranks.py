"""Two ranks over NCCL that share a GPU: each believes to be on a machine of its own (`tests/gpu/run.py`)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.gpu import checks, sharding
from tests.gpu.checks import world


@world(2)
def two_ranks_of_nccl() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.num_processes == 2 and accelerator.state.backend == "nccl"
    checks._collectives(accelerator)
    checks._trains(accelerator)


@world(2)
def two_ranks_of_nccl_search_a_batch_size() -> None:
    """One runs out of memory while the other waits on the device: all go on with one size."""
    from accelerate.utils import gather_object
    from tests.world.batch_size_search import check_outcomes, search

    check_outcomes(gather_object([search()]))


@world(2)
def out_of_memory_before_the_first_collective_of_nccl() -> None:
    """While NCCL connects its ranks, a wait cannot be ended: so it does that before the search begins."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator()
    sizes = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> float:
        sizes.append(batch_size)
        if accelerator.process_index == 1 and batch_size == 10:
            raise torch.OutOfMemoryError
        return float(accelerator.reduce(torch.ones(1, device=accelerator.device)))

    assert train() == 2.0 and sizes == [10, 9], sizes


@world(2)
def fsdp2_on_two_ranks_of_nccl() -> None:
    """Trains as one process does, leaves a bad step out on both ranks, and comes back from its checkpoint."""
    from accelerate.utils import broadcast_object_list

    losses, accelerator, model, optimizer = sharding._sharded(4, {"fsdp_version": 2}, nonfinite="skip")
    sharding._close(losses, sharding._plain(4), 1e-4)
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    accelerator.save_state(folder)
    before = _whole(accelerator, model)
    for scale in (float("inf"), 1.0):
        x, y = sharding._batches(1)[0]
        accelerator.backward(F.cross_entropy(model(x.cuda()), y.cuda()) * (scale if dist.get_rank() else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (scale != 1.0)
        same = all(torch.equal(before[name], weight) for name, weight in _whole(accelerator, model).items())
        assert same == (scale != 1.0)
    accelerator.load_state(folder)
    assert all(torch.equal(before[name], weight) for name, weight in _whole(accelerator, model).items())
    accelerator.wait_for_everyone()
    assert os.environ["RANK"] != "0" or Path(folder, "optimizer_0").is_dir()


def _whole(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    from accelerate.parallel.shards import whole

    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
