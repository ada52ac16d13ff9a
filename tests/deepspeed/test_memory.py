"""What `estimate-memory` says of a stage is what DeepSpeed holds."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn

from accelerate.estimate.usage import Workload
from accelerate.estimate.zero import zero_usage
from tests.harness import run_world

deepspeed = pytest.importorskip("deepspeed", reason="needs deepspeed")

LAYER, LAYERS = 256 * 256, 8


def held() -> int:
    """Bytes of all tensors of this process, each memory once."""
    time.sleep(0.5)  # a thread of gloo holds what was exchanged last until it gets Python's lock
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def after_a_backward(stage: int, precision: str) -> int:
    """What the states of a model take after its second backward pass."""
    deepspeed.init_distributed(dist_backend="gloo")
    before = held()
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(LAYERS)))
    sizes = {"reduce_bucket_size": LAYER, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **sizes},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config, dist_init_required=False
    )
    batch = torch.ones(1, 256, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    engine.backward(engine(batch).float().mean())
    engine.step()
    engine.backward(engine(batch).float().mean())
    return held() - before


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_as_much_as_deepspeed_holds(stage: int, precision: str) -> None:
    parameters, processes = LAYER * LAYERS, 2
    task = Workload(
        parameters, parameters, largest_layer=0, activations=0, compute_bytes=2 if precision == "bf16" else 4
    )
    used = zero_usage(task, processes, bucket=LAYER)[f"ZeRO {stage}"]
    # Gradients in float32 are there only while the step is taken.
    stepped = 4 * parameters // (1 if stage == 0 else processes) if precision == "bf16" else 0
    for found in run_world(after_a_backward, processes, stage, precision, timeout=200):
        assert found == pytest.approx(used.device - stepped, rel=0.02)
