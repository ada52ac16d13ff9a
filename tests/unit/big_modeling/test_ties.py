from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils.modeling import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from tests.unit.big_modeling.models import Net


def test_found_and_tied_again() -> None:
    model = Net()
    ties = find_tied_parameters(model)
    assert ties == [["embed.weight", "head.weight"]]
    assert find_tied_parameters(Net(tied=False)) == []
    model.embed.weight = nn.Parameter(torch.empty(8, 4, device="meta"))
    assert find_tied_parameters(model) == []
    retie_parameters(model, ties)
    assert model.embed.weight is model.head.weight and not model.head.weight.is_meta


def test_modules_under_two_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.append(model[0])
    assert find_tied_parameters(model) == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]


def test_devices_of_ties(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0, "b": 0})
        assert not caplog.messages
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0, "b": "cpu"})
    assert caplog.messages == [
        "One parameter has several devices (a.weight on 0, b.weight on cpu): give all its names the same one."
    ]
    with pytest.raises(ValueError, match=r"no device for b\.weight"):
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0})


def test_other_models_have_no_config() -> None:
    assert check_tied_parameters_in_config(Net()) is False


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_ties_of_an_offloaded_model_survive_another_hook(way: str, tmp_path: Path) -> None:
    model: Any = Net().eval()
    tokens = torch.tensor([1, 2, 3])
    expected = model(tokens)
    cpu_offload(model, "cpu") if way == "memory" else disk_offload(model, tmp_path, "cpu")
    add_hook_to_module(model.head, ModelHook(), append=True)
    assert model.head.weight is model.embed.weight and model.head.weight.is_meta
    assert torch.equal(model(tokens), expected)
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embed.weight and torch.equal(model(tokens), expected)
