"""What must hold for training in fp8 on a GPU that has it: `PYTHONPATH=src:TORCHAO python3 -m tests.gpu.fp8`.

Not among the checks of `tests.gpu.run`, since torchao has to be there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.gpu.checks import check, reset
from tests.gpu.sharding import launched

WIDTH = 512


def _network() -> nn.Module:
    torch.manual_seed(0)
    inner = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(nn.Linear(32, WIDTH), nn.GELU(), *inner, nn.Linear(WIDTH, 4))


def _train(accelerator: Any, model: Any, optimizer: Any, steps: int = 30, rows: int = 200) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 32, generator=generator).cuda()
    y = x[:, :4].sign()
    losses = []
    for _ in range(steps):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _run(mode: str, steps: int = 30, **settings: Any) -> tuple[Any, Any, Any, list[float]]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=mode, **settings)
    net = _network()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    return accelerator, model, optimizer, _train(accelerator, model, optimizer, steps)


def _near(found: list[float], expected: list[float]) -> None:
    worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    assert worst < 0.1, (worst, found, expected)
    assert found != expected and found[-1] < found[0] / 2, found


@check
def fp8_trains_like_bf16_by_every_recipe() -> None:
    from accelerate.utils import AORecipeKwargs, FP8BackendType

    expected = _run("bf16")[-1]
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        reset()
        accelerator, model, _, losses = _run("fp8", kwargs_handlers=[AORecipeKwargs(config=recipe)])
        assert accelerator.fp8_backend == FP8BackendType.AO
        assert type(model[2]).__name__ == "Float8Linear" and not model[2].config.emulate
        assert type(model[0]) is nn.Linear and type(model[-1]) is nn.Linear
        _near(losses, expected)
        model.eval()
        with torch.no_grad():
            assert model(torch.randn(7, 32, device="cuda")).dtype == torch.float32
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            assert model[2](torch.randn(16, WIDTH, device="cuda")).dtype == torch.float32


@check
def fp8_compiled_accumulated_and_saved() -> None:
    from accelerate.utils import TorchDynamoPlugin

    expected = _run("bf16", gradient_accumulation_steps=2)[-1]
    reset()
    plugin = TorchDynamoPlugin(backend="inductor")
    accelerator, model, optimizer, losses = _run("fp8", gradient_accumulation_steps=2, dynamo_plugin=plugin)
    _near(losses, expected)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        on = _train(accelerator, model, optimizer, 4)
        reset()
        accelerator, model, optimizer, _ = _run("bf16", steps=1, gradient_accumulation_steps=2)
        accelerator.load_state(folder)
        _near([1.0, *_train(accelerator, model, optimizer, 4), 0.0001], [1.0, *on, 0.0001])


@check
def fp8_weights_are_gathered_in_8_bits() -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.torch_internals.mesh import held_piece

    expected = _run("bf16")[-1]
    for twice in (False, True):
        with launched(), tempfile.TemporaryDirectory() as folder:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Linear", "Float8Linear"],
                activation_checkpointing=twice,
            )
            accelerator, model, optimizer, losses = _run("fp8", fsdp_plugin=plugin)
            _near(losses, expected)
            layer: Any = next(module for module in model.modules() if "Float8Linear" in type(module).__name__)
            piece = held_piece(layer.weight)
            assert type(piece).__name__ == "WeightWithDynamicFloat8CastTensor", type(piece)
            assert piece._precomputed_scale is not None
            accelerator.save_state(folder)
            accelerator.load_state(folder)
            assert held_piece(layer.weight)._precomputed_scale is None
            accelerator.save_model(model, Path(folder, "weights"))
            on = _train(accelerator, model, optimizer, 3)
            assert on[-1] < losses[0] / 2, on


if __name__ == "__main__":
    from tests.gpu.run import main

    raise SystemExit(main([name for name in list(globals()) if name.startswith("fp8_")]))
