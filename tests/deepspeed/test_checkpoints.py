"""Checkpoints of every stage: resumed exactly, in the layout of the released package, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing import verify_checkpoint
from tests.deepspeed import training
from tests.harness import run_world

SETTINGS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "precision": "bf16"},
    {"stage": 3},
    {"stage": 3, "precision": "bf16", "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
]


def prepared(settings: dict[str, Any], seed: int = 0) -> tuple[Accelerator, Any, Any, Any, Any]:
    acc = training.accelerator(**settings)
    net = training.model(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return (acc, *acc.prepare(net, optimizer, scheduler, DataLoader(training.data(), batch_size=4, shuffle=True)))


def steps(acc: Accelerator, net: Any, optimizer: Any, scheduler: Any, batches: Any) -> list[float]:
    losses = []
    for inputs, targets in batches:
        loss = training.loss_of(net(inputs), targets)
        acc.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def end(acc: Accelerator) -> None:
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)


def resume(folder: str, asynchronous: bool) -> None:
    for number, settings in enumerate(SETTINGS):
        target = Path(folder, str(number))
        torch.manual_seed(7)
        acc, net, optimizer, scheduler, loader = prepared(settings)
        batches = iter(loader)
        steps(acc, net, optimizer, scheduler, [next(batches) for _ in range(3)])
        acc.save_state(target, async_save=asynchronous)
        expected = steps(acc, net, optimizer, scheduler, batches)
        weights = training.weights(acc, net)
        acc.wait_for_checkpoint()
        main = acc.is_main_process
        end(acc)
        if main:
            verify_checkpoint(target)
            assert (target / "latest").read_text() == "pytorch_model"
            if settings["stage"] > 0:
                assert (target / "zero_to_fp32.py").exists()
        acc, net, optimizer, scheduler, loader = prepared(settings, seed=5)
        acc.load_state(target)
        found = steps(acc, net, optimizer, scheduler, loader)
        now = training.weights(acc, net)
        torch.testing.assert_close(
            (found, now), (expected, weights), rtol=0, atol=0, msg=lambda text, at=settings: f"{at}: {text}"
        )
        end(acc)


@pytest.mark.parametrize(("processes", "asynchronous"), [(1, True), (2, False)])
def test_training_goes_on_as_it_was(processes: int, asynchronous: bool, tmp_path: Path) -> None:
    run_world(resume, processes, str(tmp_path), asynchronous, timeout=200)
