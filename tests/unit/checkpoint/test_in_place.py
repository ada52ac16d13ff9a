"""A load goes into the memory that the run has, and not before all is known to be good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.checkpoint import reader
from accelerate.errors import CheckpointError
from accelerate.io import blocks, disk, read_tensors, safe_load


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself reads what is small."""
    monkeypatch.setattr(safe_load, "_LARGE", 1)
    monkeypatch.setattr(blocks, "BLOCK", 4096)


class Run:
    def __init__(self, model: nn.Module) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        self.step()

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.rand(2, 32)).square().sum())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        states = self.optimizer.optimizer.state.values()
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        return [*self.model.state_dict(keep_vars=True).values(), *moments]

    def values(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors()]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("without", ["", "bring_in", "mapped"])
def test_into_the_memory_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool, without: str
) -> None:
    run = Run(net())
    run.accelerator.save_state(tmp_path / "x", safe_serialization=safe)
    saved = run.values()
    run.step()
    tensors = run.tensors()
    if without == "bring_in":
        monkeypatch.setattr(disk, "bring_in", lambda address, size: False)  # an older Linux, or no Linux
    elif without == "mapped":
        for module in (reader, read_tensors):
            monkeypatch.setattr(module, "mapped", lambda path: torch.empty(0, dtype=torch.uint8))
    assert not same(run.tensors(), saved)
    run.accelerator.load_state(tmp_path / "x")
    assert same(run.tensors(), saved)
    if without != "mapped":
        assert [tensor.data_ptr() for tensor in run.tensors()] == [tensor.data_ptr() for tensor in tensors]
    fresh = Run(net())
    fresh.optimizer.optimizer.state.clear()  # it has not stepped yet
    fresh.accelerator.load_state(tmp_path / "x")
    assert same(fresh.tensors(), saved)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
@pytest.mark.parametrize("place", [0.5, 0.95])
def test_damage_leaves_it_as_it_was(tmp_path: Path, name: str, place: float) -> None:
    run = Run(net())
    run.accelerator.save_state(tmp_path / "x")
    run.step()
    before = run.values()
    content = bytearray((tmp_path / "x" / name).read_bytes())
    content[int(len(content) * place)] ^= 1
    (tmp_path / "x" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} (is damaged|cannot be read)"):
        run.accelerator.load_state(tmp_path / "x")
    assert same(run.tensors(), before)


class Turned(nn.Linear):
    """Keeps its weights the other way round than they are stored."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t().contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_what_is_made_into_something_else(tmp_path: Path) -> None:
    run = Run(nn.Sequential(Turned(32, 32)))
    run.accelerator.save_state(tmp_path / "x")
    saved = run.values()
    run.step()
    moments = [state["exp_avg"].clone() for state in run.optimizer.optimizer.state.values()]

    def add(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for number, there in enumerate(optimizer.state.values()):
            state["state"][number]["exp_avg"] = state["state"][number]["exp_avg"] + there["exp_avg"]

    handle = run.optimizer.optimizer.register_load_state_dict_pre_hook(add)
    run.accelerator.load_state(tmp_path / "x")
    handle.remove()
    assert same(run.tensors()[:2], saved[:2])
    states = list(run.optimizer.optimizer.state.values())
    assert same([state["exp_avg"] for state in states], [saved[2] + moments[0], saved[4] + moments[1]])


@pytest.mark.parametrize("safe", [True, False])
def test_shared_and_foreign_memory(tmp_path: Path, safe: bool) -> None:
    """Tied weights, parts of one memory, other strides."""

    def model() -> nn.Module:
        made = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
        made[1].weight = made[0].weight
        both = torch.rand(2, 32, 32)
        made[2].weight, made[3].weight = nn.Parameter(both[0]), nn.Parameter(both[1])
        made[4].weight = nn.Parameter(torch.rand(32, 32).t())
        made.register_buffer("one", torch.arange(10.0)[::5][1:])
        return made

    run = Run(model())
    run.accelerator.save_state(tmp_path / "x", safe_serialization=safe)
    other = Run(model())
    other.accelerator.load_state(tmp_path / "x")
    assert same(other.tensors(), run.tensors())
    assert other.model[1].weight is other.model[0].weight


def test_expanded_buffers(tmp_path: Path) -> None:
    def model(buffer: torch.Tensor) -> Run:
        made = nn.Sequential(nn.Linear(32, 32))
        made.register_buffer("mask", buffer)
        return Run(made)

    run = model(torch.rand(3, 1).expand(3, 4))
    run.accelerator.save_state(tmp_path / "x")
    other = model(torch.rand(3, 1).expand(3, 4))
    buffer = other.model.mask
    other.accelerator.load_state(tmp_path / "x")
    assert same(other.tensors(), run.tensors())
    assert other.model.mask is buffer and buffer.stride() == (1, 0)
    run.model.mask = torch.rand(3, 4)
    run.accelerator.save_state(tmp_path / "x")
    before = other.values()
    with pytest.raises(CheckpointError, match="mask of this Sequential was created with `expand`"):
        other.accelerator.load_state(tmp_path / "x")
    assert same(other.tensors(), before)
    other.model.register_load_state_dict_post_hook(lambda *args: None)
    with pytest.raises(CheckpointError, match="did not accept the weights"):
        other.accelerator.load_state(tmp_path / "x")
    assert same(other.tensors(), before)


def test_a_graph_from_before_is_refused(tmp_path: Path) -> None:
    run = Run(net())
    run.accelerator.save_state(tmp_path / "x")
    loss = run.model(torch.rand(2, 32)).square().sum()
    run.accelerator.load_state(tmp_path / "x")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
