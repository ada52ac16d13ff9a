"""A small run that saves or loads a checkpoint and tells its state: for this package and for the released one alike."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


class Counter:
    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.tanh(self.first(x))))


def main(action: str, folder: str, safe: str, precision: str) -> None:
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, project_config=config)
    set_seed(1 if action == "save" else 2, device_specific=True)
    net, other = Tied(), torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), 2, shuffle=True)
    net, other, optimizer, second, scheduler, loader = accelerator.prepare(
        net, other, optimizer, second, scheduler, loader
    )
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if action == "save":
        for (x,) in loader:
            accelerator.backward(net(x).square().sum() + other(x[:, :3]).square().sum())
            for one in (optimizer, second):
                one.step()
                one.zero_grad()
            scheduler.step()
            counter.value += 1
        for _ in range(2):
            with accelerator.accumulate(net):
                pass
        for _ in range(3):
            accelerator.save_state(safe_serialization=safe == "safe")
        accelerator.wait_for_everyone()
    else:
        accelerator.load_state()
    state: dict[str, Any] = {
        "weights": [p.tolist() for model in (net, other) for p in model.parameters()],
        "optimizers": [_values(one) for one in (optimizer, second)],
        "rates": scheduler.get_last_lr(),
        "counter": counter.value,
        "step": accelerator.step,
        "draws": [random.random(), float(np.random.rand()), torch.rand(2).tolist()],
    }
    if accelerator.scaler is not None:
        state["scale"] = accelerator.scaler.get_scale()
    with open(f"{folder}/{action}-{accelerator.process_index}.json", "w") as file:
        json.dump(state, file)
    accelerator.wait_for_everyone()
    time.sleep(0.1)  # on the released package, torch may hang or abort where a group ends right after a collective
    accelerator.end_training()


def _values(optimizer: Any) -> list[Any]:
    states = optimizer.state_dict()["state"]
    return [[torch.as_tensor(value).tolist() for value in states[key].values()] for key in sorted(states)]


if __name__ == "__main__":
    main(*sys.argv[1:])
