"""A training with DeepSpeed by public names, run on this package and on the released one by `test_released.py`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs

AUTO: dict[str, Any] = {
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
SCHEDULER = {"type": "WarmupDecayLR", "params": dict.fromkeys(WARMUP, "auto")}
# What scripts have: the config, the Accelerator's arguments, how many loaders, and whether the file has the optimizer.
SCRIPTS: dict[str, dict[str, Any]] = {
    "all in the file": {"config": {**AUTO, "optimizer": OPTIMIZER, "scheduler": SCHEDULER}, "own": False},
    "own optimizer": {"config": AUTO, "own": True},
    "bf16, accumulated": {"config": AUTO, "own": True, "mixed_precision": "bf16", "gradient_accumulation_steps": 3},
    "the file accumulates": {
        "config": {**AUTO, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
        "own": True,
        "gradient_accumulation_steps": 3,
    },
    "batches are split": {
        "config": {**AUTO, "optimizer": OPTIMIZER, "scheduler": SCHEDULER},
        "own": False,
        "dataloader_config": {"split_batches": True},
    },
    "the file has a size": {"config": {**AUTO, "train_micro_batch_size_per_gpu": 2}, "own": True},
    "no file": {"config": None, "own": True},
}
STAGES = (1, 2, 3)


class Net(nn.Sequential):
    class config:
        hidden_size = 20


def model(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 3))


def data(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator))


def gloo() -> InitProcessGroupKwargs:
    """With which the released package takes DeepSpeed without a card, which it else refuses."""
    return InitProcessGroupKwargs(backend="gloo")


def end(acc: Accelerator) -> None:
    acc.free_memory()
    AcceleratorState._reset_state()


def filled(
    config: dict[str, Any] | None, own: bool, dataloader_config: dict[str, Any] | None = None, **given: Any
) -> Any:
    """The config of an engine, with all that was "auto" filled in."""
    plugin = DeepSpeedPlugin(zero_stage=1) if config is None else DeepSpeedPlugin(hf_ds_config=config)
    loading = DataLoaderConfiguration(**(dataloader_config or {}))
    acc = Accelerator(deepspeed_plugin=plugin, dataloader_config=loading, kwargs_handlers=[gloo()], **given)
    net = model(0)
    optimizer: Any = torch.optim.AdamW(net.parameters()) if own else DummyOptim(net.parameters(), lr=0.5)
    scheduler = None if own else DummyScheduler(optimizer, total_num_steps=11)
    loaders = [DataLoader(data(), batch_size=size) for size in (4, 8)]
    acc.prepare(net, optimizer, *loaders, *([] if scheduler is None else [scheduler]))
    found = {**acc.state.deepspeed_plugin.deepspeed_config, "steps of the Accelerator": acc.gradient_accumulation_steps}
    end(acc)
    return found


def train(stage: int, writes: Path | None, reads: Path | None) -> list[float]:
    """Losses of four steps; the first two come before what is written."""
    plugin = DeepSpeedPlugin(zero_stage=stage, zero3_init_flag=False)
    acc = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo()])
    net: Any = model(0 if reads is None else 5)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.02)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    net, optimizer, schedule, loader = acc.prepare(net, optimizer, schedule, DataLoader(data(), batch_size=4))
    batches = list(loader)[:4]
    if reads is not None:
        acc.load_state(str(reads))
        batches = batches[2:]
    losses = []
    for number, (inputs, targets) in enumerate(batches):
        if number == 2 and writes is not None:
            acc.save_state(str(writes))
        loss = ((net(inputs) - targets) ** 2).mean()
        acc.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    end(acc)
    return losses


def main(answers: str, *, writes: Path | None, reads: Path | None) -> None:
    found: dict[str, Any] = {}
    if writes is not None:
        found["losses"] = [train(stage, writes / str(stage), None) for stage in STAGES]
        found["filled"] = {name: filled(**script) for name, script in SCRIPTS.items()}
    if reads is not None:
        found["read"] = [train(stage, None, reads / str(stage)) for stage in STAGES]
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", help="a file for what is found, with {rank} in its name")
    parser.add_argument("--writes", type=Path)
    parser.add_argument("--reads", type=Path)
    asked = vars(parser.parse_args())
    main(asked.pop("answers").format(rank=os.environ["RANK"]), **asked)
