"""The same global batch gives the same losses on 1, 2 and 4 processes as plain PyTorch on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from tests.harness import run_world
from tests.unit.accelerator.toys import Net, assert_same_everywhere, data, gradients, loader, weights

GLOBAL_BATCH, STEPS = 16, 20


def by_hand(accumulation: int) -> list[float]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x, y = data(GLOBAL_BATCH * STEPS).tensors
    losses = []
    for step in range(STEPS):
        part = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        loss = nn.functional.mse_loss(model(x[part]), y[part])
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0 or step == STEPS - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _train(accumulation: int) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    net = Net()
    model, optimizer, batches = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.02),
        loader(GLOBAL_BATCH * STEPS, GLOBAL_BATCH // accelerator.num_processes),
    )
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert_same_everywhere(weights(model))
    return losses


@pytest.mark.parametrize("accumulation", [1, 3])
def test_loss_curves_agree(accumulation: int) -> None:
    expected = by_hand(accumulation)
    assert len(expected) == STEPS and expected[-1] != expected[0]
    for processes in (1, 2, 4):
        for losses in run_world(_train, processes, accumulation):
            assert losses == pytest.approx(expected, rel=1e-5), processes


def _sync() -> None:
    rank = torch.full((2, 4), float(Accelerator().process_index + 1))
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    wrapped = model
    wrapped(rank).sum().backward()
    synced = gradients(model)
    model.zero_grad()
    assert_same_everywhere(synced)

    with accelerator.no_sync(model):
        wrapped(rank).sum().backward()
    local = gradients(model)
    assert not torch.equal(local, synced)
    every = accelerator._communicator.gather_objects(local)
    torch.testing.assert_close(torch.stack(every).mean(dim=0), synced)
    model.zero_grad()

    # Only what was not synced before: the forward under no_sync, the backward after all with everybody.
    with accelerator.no_sync(model):
        loss = wrapped(rank).sum()
        with accelerator.trigger_sync_in_backward(model):
            loss.backward()
    torch.testing.assert_close(gradients(model), synced)
    model.zero_grad()
    # And afterwards everything is as before.
    wrapped(rank).sum().backward()
    torch.testing.assert_close(gradients(model), synced)


def test_no_sync_and_trigger_sync_in_backward() -> None:
    run_world(_sync, 2)


def _accumulated(each: bool) -> torch.Tensor:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=each)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(Net())
    for number in range(3):
        with accelerator.accumulate(model):
            x = torch.full((2, 4), float(accelerator.process_index + number))
            accelerator.backward(model(x).sum())
            everywhere = accelerator._communicator.gather_objects(gradients(model))
            same = torch.allclose(everywhere[0], everywhere[1])
            assert same == (each or accelerator.sync_gradients)
    return gradients(model)


def test_sync_each_batch_gives_the_same_gradients() -> None:
    once, each = run_world(_accumulated, 2, False), run_world(_accumulated, 2, True)
    torch.testing.assert_close(once[0], each[0])
    torch.testing.assert_close(each[0], each[1])
