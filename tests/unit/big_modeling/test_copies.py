"""Copies and pickles of offloaded models: as good as the model they were made of, and apart from it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.big_modeling.streaming import Streamer
from accelerate.hooks import remove_hook_from_module, remove_hook_from_submodules
from accelerate.hooks.align import align_hooks

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
