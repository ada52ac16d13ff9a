"""Compiled models, whole and by regions, train like plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, has_compiled_regions, is_compiled_module
from tests.harness import run_world
from tests.unit.accelerator.toys import ALONE, Net, assert_same_everywhere, loader, weights


class Deep(Net):
    """With repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        with torch.no_grad():
            for block in self.blocks:
                for parameter in block.parameters():
                    parameter.fill_(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return super().forward(x)


def _train(backend: str | None, regions: bool, precision: str) -> torch.Tensor:
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regions) if backend else None
    accelerator = Accelerator(dynamo_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=precision)
    net = Deep()
    model, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), loader(48))
    if backend:
        assert has_compiled_regions(model)
        assert is_compiled_module(model) == (not regions)
    for x, y in batches:
        with accelerator.accumulate(model):
            out = model(x)
            assert out.dtype is torch.float32
            accelerator.backward(nn.functional.mse_loss(out, y))
            if accelerator.num_processes > 1:
                grads: Any = accelerator._communicator.gather_objects(net.first.weight.grad)
                assert torch.equal(grads[0], grads[1]) == accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    assert_same_everywhere(weights(model))
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is net
    assert set(accelerator.get_state_dict(model)) == set(Deep().state_dict())
    return weights(net)


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_compiled_training(processes: int, regions: bool) -> None:
    env = ALONE if processes == 1 else {}
    for precision in ("no", "bf16") if processes == 1 else ("no",):
        plain = run_world(_train, processes, None, False, precision, env=env)
        compiled = run_world(_train, processes, "eager", regions, precision, env=env)
        torch.testing.assert_close(compiled[0], plain[0], rtol=1e-4, atol=1e-5)


def _by_name() -> None:
    accelerator = Accelerator(dynamo_backend="eager")
    model = accelerator.prepare(Net())
    assert is_compiled_module(model)
    assert accelerator.prepare(model) is model
    assert type(accelerator.unwrap_model(model, keep_torch_compile=False)) is Net
    with pytest.raises(ValueError, match="not both"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())


def test_by_name() -> None:
    run_world(_by_name, 1, env=ALONE)
