"""The end of a run."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from tests.harness import run_world


def evaluate_and_end() -> int:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(torch.nn.Linear(4, 1), DataLoader(torch.ones(15, 4), batch_size=2))
    samples = 0
    for batch in loader:
        with torch.no_grad():
            outputs = model(batch)
        samples += len(accelerator.gather_for_metrics({"x": outputs, "name": ["a"] * len(batch)})["name"])
    accelerator.end_training()
    # The model is freed now, and with it the last reference to the group but ours.
    return samples


def test_a_run_can_be_ended_right_after_a_collective() -> None:
    for _ in range(6):
        assert run_world(evaluate_and_end, 2, timeout=30) == [15, 15]
