"""Sharded models of every kind, and several of them: for both versions of FSDP."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.errors import CheckpointError
from accelerate.parallel.shards import whole
from accelerate.state import AcceleratorState
from tests.harness import run_world
from tests.harness.torch_features import leaves_parameters_whole, takes_frozen_weights_as_they_are
from tests.world.towers import Tower, loss_of, tokens_of, trains_as_one_process


def _accelerator(version: int, mixed_precision: str | None = None, **settings: Any) -> Accelerator:
    AcceleratorState._reset_state()
    settings = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]} | settings
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, use_orig_params=True if version == 1 else None, **settings
    )
    return Accelerator(cpu=True, mixed_precision=mixed_precision, fsdp_plugin=plugin)


def _tower_trains(accelerator: Accelerator, plain: Tower) -> Any:
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    trains_as_one_process(accelerator, model, optimizer, 2, accelerator.process_index, accelerator.num_processes)
    return model


def _forgets_the_optimizer(version: int, settings: dict[str, Any]) -> list[list[str]]:
    """What is said where it is forgotten, where it is prepared, and where it was made from the sharded model."""
    said = []
    for how in ("forgotten", "prepared", "afterwards"):
        AcceleratorState._reset_state()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="no_wrap", **settings)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        plain = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        model = accelerator.prepare(plain)
        if how == "prepared":
            optimizer = accelerator.prepare(optimizer)
        if how == "afterwards":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
        said.append([str(each.message) for each in caught if "optimizer" in str(each.message)])
    return said


@pytest.mark.parametrize(
    ("version", "settings"), [(1, {"use_orig_params": False}), (1, {"use_orig_params": True}), (2, {})]
)
def test_an_optimizer_that_was_not_prepared(version: int, settings: dict[str, Any]) -> None:
    first, second = run_world(_forgets_the_optimizer, 2, version, settings)
    assert second == [[], [], []]
    ([forgotten], *others) = first
    assert "an optimizer (SGD) with the parameters that the model had before it was sharded" in forgotten
    assert others == [[], []]


class Odd(nn.Module):
    """Tensors whose rows do not lie one after the other, and state that is no tensor."""

    def __init__(self, scalar: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4, generator=generator).t())
        self.scale = nn.Parameter(torch.tensor(2.0) if scalar else torch.tensor([2.0]))
        self.register_buffer("turned", torch.arange(6.0).reshape(1, 6).t())
        self.register_buffer("repeated", torch.arange(3.0).expand(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.scale + self.turned[:, 0] + self.repeated.mean()

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 1}


def _odd_tensors(version: int) -> None:
    accelerator = _accelerator(version, auto_wrap_policy="no_wrap")
    if version == 1:
        with pytest.raises(ValueError, match=r"without a dimension \(scale\)"):
            accelerator.prepare(Odd(scalar=True))
    plain, alone = Odd(scalar=version == 2), Odd(scalar=version == 2)
    mine = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    for model, inner in ((plain, mine), (alone, theirs)):
        model(inputs).square().mean().backward()
        inner.step()
        inner.zero_grad()
    model, optimizer = accelerator.prepare(plain, mine)
    for _ in range(2):
        accelerator.backward(model(inputs[2 * accelerator.process_index :][:2]).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        alone(inputs).square().mean().backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
        theirs.step()
        theirs.zero_grad()
    for name, value in accelerator.get_state_dict(model).items():
        if name != "_extra_state":
            torch.testing.assert_close(value, alone.state_dict()[name])
    accelerator.save_state("checkpoint")
    accelerator.load_state("checkpoint")
    accelerator.save_model(model, "torch", safe_serialization=False)
    with pytest.raises(CheckpointError, match="_extra_state in the state dict is a dict"):
        accelerator.save_model(model, "safe")


@pytest.mark.parametrize("version", [1, pytest.param(2, marks=leaves_parameters_whole)])
def test_odd_tensors(version: int) -> None:
    run_world(_odd_tensors, 2, version)


class One(nn.Linear):
    pass


class Other(nn.Linear):
    pass


def _several(version: int) -> None:
    """Models with other layers, sizes and uses than the first one; and what is given for one of them only."""
    accelerator = _accelerator(version, transformer_cls_names_to_wrap=None)
    for kind in (One, Other):
        model = nn.Sequential(kind(4, 4), nn.Linear(4, 4))
        model._no_split_modules = ["One", "Other"] if kind is One else ["Other"]  # type: ignore[assignment]
        accelerator.prepare(model)
        assert isinstance(model[0], (FSDPModule, Wrapper))

    for given in (lambda tower: ["blocks.0", "blocks.1.norm"], lambda tower: tower.blocks[0], lambda tower: "blocks.0"):
        accelerator = _accelerator(version)
        plain = Tower()
        accelerator.state.fsdp_plugin.ignored_modules = given(plain)  # type: ignore[no-untyped-call]
        model = _tower_trains(accelerator, plain)
        assert model.blocks[0].up.weight.numel() == 128 and type(model.blocks[0].up.weight) is nn.Parameter
        accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))  # which has nothing of that

    accelerator = _accelerator(version)
    towers = [Tower(), Tower(width=16, seed=1)]
    pairs: list[Any] = []
    for tower in towers:
        optimizer = torch.optim.AdamW(tower.parameters(), lr=1e-2)
        model = accelerator.prepare(tower).to(accelerator.device)
        pairs.append((model, accelerator.prepare(optimizer)))
    judge = accelerator.prepare_model(Tower(seed=3), evaluation_mode=True)
    assert not isinstance(judge, (FSDPModule, Wrapper))

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            for model, optimizer in pairs:
                loss = loss_of(model, tokens_of(step, accelerator.process_index, accelerator.num_processes))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses

    train(range(2))
    accelerator.save_state("checkpoint")
    expected = train(range(2, 4))
    before = judge.head.weight.detach().clone()
    nn.init.zeros_(judge.head.weight)
    accelerator.load_state("checkpoint")
    assert train(range(2, 4)) == expected and torch.equal(judge.head.weight, before)


@pytest.mark.parametrize("version", [1, pytest.param(2, marks=leaves_parameters_whole)])
def test_several(version: int) -> None:
    run_world(_several, 2, version)


def _frozen_in_low_precision(version: int) -> None:
    """Adapters among weights of the same low precision, which stay what they are."""
    accelerator = _accelerator(version, "bf16")
    plain = Tower().to(torch.bfloat16)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("up" in name)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(trained, lr=1e-2))
    for step in range(2):
        accelerator.backward(loss_of(model, tokens_of(step, accelerator.process_index, 2)))
        optimizer.step()
        optimizer.zero_grad()
    before = Tower().to(torch.bfloat16).state_dict()
    for name, value in accelerator.get_state_dict(model).items():
        assert torch.equal(value.to(torch.bfloat16), before[name]) == ("up" not in name), name
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("version", [1, pytest.param(2, marks=takes_frozen_weights_as_they_are)])
def test_frozen_in_low_precision(version: int) -> None:
    run_world(_frozen_in_low_precision, 2, version)


def _loose_parameter(version: int) -> None:
    """An optimizer with a parameter that no prepared model has."""
    accelerator = _accelerator(version)
    plain, loose = Tower(), nn.Parameter(torch.ones(3))
    model, _ = accelerator.prepare(plain, torch.optim.SGD([*plain.parameters(), loose], lr=0.1, momentum=0.9))
    if version == 1:
        with pytest.raises(CheckpointError, match="belong to no prepared model"):
            accelerator.save_state("checkpoint")
    else:
        accelerator.save_state("checkpoint")
        accelerator.load_state("checkpoint")
        assert torch.equal(whole(model.embed.weight), Tower().embed.weight)


@pytest.mark.parametrize("version", [1, 2])
def test_loose_parameter(version: int) -> None:
    run_world(_loose_parameter, 2, version)
