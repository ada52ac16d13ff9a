"""Training in fp8 on two processes, with the real torchao: every engine trains as one process does in fp8."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, available
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.torch_internals.mesh import held_piece
from tests.harness import run_world

if not available.is_torchao_available():
    assert "REQUIRE_FP8" not in os.environ, "torchao is not installed here"
    pytest.skip("torchao is not installed: `make fp8` runs these tests", allow_module_level=True)

ROWS = 32


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(16, 32)
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.last(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].sign()


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int, shares: int) -> list[float]:
    x, y = batch()
    if shares > 1:
        mine = slice(accelerator.process_index * ROWS // shares, (accelerator.process_index + 1) * ROWS // shares)
        x, y = x[mine], y[mine]
    losses = []
    for _ in range(steps):
        for half in (slice(0, None, 2), slice(1, None, 2)):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x[half]), y[half])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def prepared(seed: int = 0, **settings: Any) -> Any:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, gradient_accumulation_steps=2, **settings)
    net = Net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)  # made before `prepare`
    return (accelerator, *accelerator.prepare(net, optimizer))


def end() -> None:
    PartialState().destroy_process_group()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def sharded(version: int, **settings: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Part"],
        **settings,
    )


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "Float8Linear"]


def every_engine(folder: Path) -> dict[str, list[float]]:
    found = {}
    accelerator, model, optimizer = prepared()
    assert len(layers_of(model)) == 4
    found["DDP"] = train(accelerator, model, optimizer, 6, 2)
    end()

    plan = {f"parts.{i}.{name}": style for i in range(2) for name, style in (("up", "colwise"), ("down", "rowwise"))}
    Net._tp_plan = plan  # type: ignore[attr-defined]
    accelerator, model, optimizer = prepared(parallelism_config=ParallelismConfig(tp_size=2))
    assert tuple(model.parts[0].up.weight.to_local().shape) == (32, 32)
    found["tensor parallel"] = train(accelerator, model, optimizer, 6, 1)
    end()

    accelerator, model, optimizer = prepared(fsdp_plugin=sharded(1))
    found["FSDP1"] = train(accelerator, model, optimizer, 6, 2)
    end()

    for name, plugin in {
        "FSDP2": sharded(2, cpu_ram_efficient_loading=True),
        "FSDP2, computed twice": sharded(2, activation_checkpointing=True, reshard_after_forward=False),
    }.items():
        accelerator, model, optimizer = prepared(PartialState().process_index, fsdp_plugin=plugin)
        found[name] = train(accelerator, model, optimizer, 6, 2)
        pieces = [held_piece(layer.weight) for layer in layers_of(model)]
        assert {type(piece).__name__ for piece in pieces} == {"WeightWithDynamicFloat8CastTensor"}
        assert all(piece._precomputed_scale is not None for piece in pieces), "found with one message after each step"
        # What is saved are plain weights, and what is loaded gets a scale of its own.
        assert not any(hasattr(value.to_local(), "_precomputed_scale") for value in model.state_dict().values())
        accelerator.save_state(str(folder / name))
        accelerator.save_model(model, folder / f"{name} weights")
        on = train(accelerator, model, optimizer, 2, 2)
        accelerator.load_state(str(folder / name))
        assert all(held_piece(layer.weight)._precomputed_scale is None for layer in layers_of(model))
        assert train(accelerator, model, optimizer, 2, 2) == on
        end()
    return found


def test_every_engine_trains_as_one_process(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    expected = train(accelerator, model, optimizer, 6, 1)
    assert expected[-1] < expected[0] / 2
    for found in run_world(every_engine, 2, tmp_path):
        for name, losses in found.items():
            worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
            assert worst < 0.05, (name, worst, losses, expected)
    # Without processes, without shards: the same names, read by a model in bf16.
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "FSDP2 weights" / "model.safetensors")
    Net().load_state_dict(weights)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    net = Net(5)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    accelerator.load_state(str(tmp_path / "FSDP2"))
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
