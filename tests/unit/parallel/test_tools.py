"""The steps of sharding that need no second process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from accelerate import FullyShardedDataParallelPlugin
from accelerate.strategies.wrapping import compute_twice, ignored_modules, parts
from accelerate.utils import (
    ensure_weights_retied,
    fsdp2_canonicalize_names,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
)
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules

CPU = torch.device("cpu")


class Pair(nn.Module):
    """Two blocks, and ends that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _plugin(**kwargs: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, **kwargs)


def _names(model: nn.Module, chosen: list[nn.Module]) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in chosen]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["blocks.1", "blocks.0"]),  # found by themselves
        ({"auto_wrap_policy": "no_wrap"}, []),
        (
            {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Sequential"]},
            ["blocks.1", "blocks.0"],
        ),
        # 40 in each block, 20 in each of its layers; the ends share a weight and stay with the model.
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 40}, ["blocks.1", "blocks.0"]),
        (
            {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20},
            ["blocks.1.1", "blocks.1.0", "blocks.0.1", "blocks.0.0"],
        ),
        ({"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential})}, ["blocks.1", "blocks.0"]),
        (
            {"auto_wrap_policy": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Embedding)},
            [],
        ),
    ],
)
def test_parts(settings: dict[str, Any], expected: list[str]) -> None:
    model = Pair()
    assert _names(model, parts(_plugin(**settings), model, [])) == expected


def test_ignored_parts_are_not_chosen() -> None:
    model = Pair()
    plugin = _plugin(auto_wrap_policy="size_based_wrap", min_num_params=20, ignored_modules=r"blocks\.0")
    ignored = ignored_modules(plugin, model)
    assert _names(model, ignored) == ["blocks.0"]
    assert _names(model, parts(plugin, model, ignored)) == ["blocks.1.1", "blocks.1.0"]
    assert ignored_modules(_plugin(ignored_modules=[model.head]), model) == [model.head]
    assert ignored_modules(_plugin(), model) == []


def test_policy_as_a_function() -> None:
    model = Pair()
    plugin = _plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Sequential"])
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert policy is not None and policy(model.blocks[0]) and not policy(model.head)
    assert fsdp2_prepare_auto_wrap_policy(_plugin(), model) is None


@pytest.mark.parametrize("offload", [False, True])
def test_compute_twice(offload: bool) -> None:
    model = Pair()
    twin = copy.deepcopy(model)
    calls: list[int] = []
    model.blocks[0][0].register_forward_hook(lambda *_: calls.append(1))
    compute_twice(model.blocks[0], offload=offload)
    x = torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert len(calls) == 2
    twin(x.detach()).sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert set(model.state_dict()) == set(twin.state_dict())
    # A copy computes with its own weights.
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(x).abs().sum() == 0


def test_parameters_of_modules() -> None:
    model = Pair()
    assert get_parameters_from_modules(None, model, CPU) == set()
    assert get_parameters_from_modules("nothing", model, CPU) == set()
    expected = set(model.blocks[1].parameters())
    assert get_parameters_from_modules(r"blocks\.1", model, CPU) == expected
    assert get_parameters_from_modules([model.blocks[1]], model, CPU) == expected


def test_names() -> None:
    names = {"_orig_mod.a._checkpoint_wrapped_module.b": 1, "_orig_mod._orig_mod.c": 2, "module.x": 3}
    assert fsdp2_canonicalize_names(names) == {"a.b": 1, "c": 2, "module.x": 3}


def test_switching_parameters() -> None:
    model = Pair()
    optimizer = torch.optim.Adam(
        [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 1.0}]
    )
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    old = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    new = {parameter.data_ptr(): nn.Parameter(parameter.detach().clone()) for parameter in old}
    before = optimizer.state[old[0]]["exp_avg"].clone()
    fsdp2_switch_optimizer_parameters(optimizer, new)
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in listed] == [id(new[parameter.data_ptr()]) for parameter in old]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1.0]
    assert torch.equal(optimizer.state[listed[0]]["exp_avg"], before)
    with pytest.raises(KeyError, match="no new parameter for one of shape"):
        fsdp2_switch_optimizer_parameters(torch.optim.SGD(model.parameters(), lr=0.1), {})


def test_shared_weights_stay_shared() -> None:
    with torch.device("meta"):
        model = Pair()

    def allocate(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    initialize = ensure_weights_retied(allocate, model, CPU)
    for module in model.modules():
        initialize(module)
    assert model.head.weight is model.embed.weight and not model.head.weight.is_meta
    assert ensure_weights_retied(allocate, nn.Linear(1, 1), CPU) is allocate


def test_scaler() -> None:
    scaler = get_fsdp2_grad_scaler(init_scale=4.0)
    assert isinstance(scaler, torch.amp.GradScaler) and scaler.get_scale() == 4.0
