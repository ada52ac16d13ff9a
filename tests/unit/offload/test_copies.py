"""Copies and pickles of offloaded models: as good as the model they were made of, and apart from it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.hooks.align import align_hooks
from accelerate.offload.streaming import Streamer

X = torch.ones(1, 4)
WAYS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "memory": lambda made, folder: cpu_offload(made, "cpu"),
    "disk": lambda made, folder: disk_offload(made, folder, "cpu"),
    "mixed": lambda made, folder: dispatch_model(made, {"0": "cpu", "1": "disk", "2": "disk"}, offload_dir=folder),
}


def tied_net() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    made[2].weight = made[0].weight
    return made


def saved_and_loaded(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


def streamers(model: nn.Module) -> set[Streamer]:
    return {hook._streamer for part in model.modules() for hook in align_hooks(part) if hook._streamer is not None}


def test_a_deep_model_is_copied_with_one_streamer() -> None:
    model = cpu_offload(nn.Sequential(*(nn.Linear(4, 4) for _ in range(400))), "cpu")
    other = copy.deepcopy(model)
    assert torch.equal(other(X), model(X))
    (streamer,) = streamers(other)
    assert streamer not in streamers(model)
    assert align_hooks(other)[0]._watchers == [streamer]
    assert len(streamer._known) == 400
    other[0].weight.data.zero_()
    assert torch.equal(model[0](X), copy.deepcopy(model)[0](X)) and not torch.equal(other[0](X), model[0](X))


@pytest.mark.parametrize("through", [lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded])
@pytest.mark.parametrize("way", list(WAYS))
def test_writes_to_a_pickled_model_count(way: str, through: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model = WAYS[way](tied_net(), tmp_path)
    expected = tied_net()(X)
    other = through(model)
    assert torch.equal(other(X), expected)
    assert other[0].weight is other[2].weight  # type: ignore[index]
    reference = tied_net()
    for changed in (other, reference):
        with torch.no_grad():
            changed[0].weight.mul_(2)  # type: ignore[index,union-attr]
            changed[2].bias.zero_()  # type: ignore[index,union-attr]
    assert torch.equal(other(X), reference(X))
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(other)
    assert torch.equal(other(X), reference(X))
    assert all(torch.equal(other.state_dict()[name], value) for name, value in reference.state_dict().items())


@pytest.mark.parametrize("way", list(WAYS))
def test_ties_hold_when_hooks_are_removed(way: str, tmp_path: Path) -> None:
    model = WAYS[way](tied_net(), tmp_path)
    remove_hook_from_submodules(model)
    assert model[0].weight is model[2].weight and not model[0].weight.is_meta  # type: ignore[index,union-attr]
    assert torch.equal(model(X), tied_net()(X))


def test_attributes_of_a_parameter_are_in_a_pickle() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.sharded = True
    other = pickle.loads(pickle.dumps(cpu_offload(model, "cpu")))
    assert other[0].weight.sharded
    seen = []
    other[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.sharded))
    other(X)
    assert seen == [True]


def test_hooks_removed_from_one_of_two_modules_that_share_a_weight() -> None:
    model = cpu_offload(tied_net(), "cpu")
    remove_hook_from_module(model[0])  # type: ignore[index]
    assert not model[0].weight.is_meta and model[2].weight.is_meta  # type: ignore[index,union-attr]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert torch.equal(other(X), tied_net()(X))
        if other is not model:
            remove_hook_from_submodules(other)
            other[2].weight.data.zero_()
    remove_hook_from_submodules(model)
    assert model[0].weight is model[2].weight  # type: ignore[index,union-attr]


class Tied(nn.Module):
    """Layers of the size of a tied embedding, whose first memory is free again once it was placed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(64))
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.head(x)
        return out


def test_copies_do_not_take_another_weight_for_a_tied_one() -> None:
    """Memory of the copy may have an address that a tied weight once had. `cpu:0` stands for a GPU: it is a copy."""
    torch.manual_seed(0)
    tokens = torch.arange(16)
    model = Tied().requires_grad_(False)
    expected = model(tokens)
    dispatch_model(model, {"embed": "cpu:0", "layers": "cpu", "head": "cpu:0"})
    assert model.layers[0].weight.is_meta and model.head.weight is model.embed.weight
    copies = [copy.deepcopy(model) for _ in range(3)]
    assert all(torch.equal(made(tokens), expected) for made in (model, *copies))
    assert all(made.head.weight is made.embed.weight for made in copies)


def test_addresses_are_looked_at_only_when_a_hook_is_put_on() -> None:
    layer, shared, wrong = nn.Linear(4, 4, bias=False), torch.ones(4, 4), torch.zeros(4, 4)
    weights = {"weight": torch.full((4, 4), 3.0)}
    known: dict[int, dict[Any, torch.Tensor]] = {weights["weight"].data_ptr(): {"cpu": shared}}
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights, tied_params_map=known))
    assert torch.equal(layer(X), X @ shared)
    other = copy.deepcopy(layer)
    (hook,) = align_hooks(other)
    assert hook.weights_map is not None and hook.tied_params_map is not None
    hook.tied_params_map[hook.weights_map["weight"].data_ptr()] = {"cpu": wrong}
    assert torch.equal(other(X), X @ shared)
