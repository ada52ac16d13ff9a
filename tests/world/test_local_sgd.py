"""LocalSGD against averaging written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import FullyShardedDataParallelPlugin
from tests.harness import run_world
from tests.unit.accelerator.toys import Net, assert_same_everywhere, data, everywhere, weights

EVERY, STEPS = 3, 7


def _batches(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = data(4 * ranks * STEPS).tensors
    pairs = list(zip(x.split(4), y.split(4), strict=True))
    return pairs[rank::ranks]


def by_hand(ranks: int) -> torch.Tensor:
    models = [Net() for _ in range(ranks)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            x, y = _batches(rank, ranks)[step]
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        if (step + 1) % EVERY == 0 or step == STEPS - 1:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(same)).mean(dim=0)
                    for parameter in same:
                        parameter.copy_(mean)
    return weights(models[0])


def _train(enabled: bool) -> torch.Tensor:
    accelerator = Accelerator()
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=EVERY, enabled=enabled) as local:
        for number, (x, y) in enumerate(_batches(accelerator.process_index, accelerator.num_processes), start=1):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            local.step()
            if accelerator.num_processes > 1:
                first, second = everywhere(weights(model))[:2]
                assert torch.equal(first, second) == (not enabled or number % EVERY == 0)
    assert_same_everywhere(weights(model))
    return weights(model)


@pytest.mark.parametrize("processes", [1, 2])
def test_it_is_averaging_by_hand(processes: int) -> None:
    for result in run_world(_train, processes, True):
        torch.testing.assert_close(result, by_hand(processes), rtol=1e-5, atol=1e-6)


def test_switched_off_it_is_plain_ddp() -> None:
    off = run_world(_train, 2, False)
    assert not torch.allclose(off[0], by_hand(2), rtol=1e-5, atol=1e-6)


def test_steps_below_one() -> None:
    with pytest.raises(ValueError, match="local_sgd_steps is 0"):
        LocalSGD(Accelerator(), Net(), 0)


def test_an_error_inside_passes_through_and_gradients_sync_again() -> None:
    run_world(_error, 2)


def _error() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    with pytest.raises(KeyError), LocalSGD(accelerator, model, 2):
        raise KeyError
    assert model.require_backward_grad_sync


def refused() -> str:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare(Net())
    with pytest.raises(NotImplementedError) as caught:
        LocalSGD(accelerator, model, EVERY)
    LocalSGD(accelerator, model, EVERY, enabled=False)
    return str(caught.value)


def test_shards_are_not_averaged() -> None:
    assert all("whose processes hold shards of a model and not copies" in said for said in run_world(refused, 2))
