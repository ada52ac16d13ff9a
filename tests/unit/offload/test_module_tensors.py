from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.utils import is_xpu_available
from accelerate.utils.modeling import (
    check_device_same,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)
from tests.unit.big_modeling.models import Net


def test_tensors_of_a_module() -> None:
    model = Net(blocks=1)
    assert [name for name, _ in named_module_tensors(model)] == ["scale"]
    assert list(named_module_tensors(model, include_buffers=False)) == []
    names = [name for name, _ in named_module_tensors(model, recurse=True)]
    assert names[0] == "embed.weight" and "scale" in names and "norm.running_mean" in names
    kept = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert sorted([*kept, "scale"]) == sorted(names)


def test_buffers_that_are_not_saved() -> None:
    outer = nn.Sequential(Net())
    assert get_non_persistent_buffers(outer) == set()
    assert get_non_persistent_buffers(outer, recurse=True) == {"scale"}
    assert get_non_persistent_buffers(outer, recurse=True, fqns=True) == {"0.scale"}
    outer.append(outer[0])
    assert get_non_persistent_buffers(outer, recurse=True, fqns=True) == {"0.scale", "1.scale"}


def test_there_and_back() -> None:
    model = Net()
    value = model.blocks[0].first.weight.detach().clone()
    model.blocks[0].first.weight.requires_grad_(False)
    set_module_tensor_to_device(model, "blocks.0.first.weight", "meta")
    assert model.blocks[0].first.weight.is_meta
    with pytest.raises(ValueError, match=r"blocks\.0\.first\.weight is on the meta device"):
        set_module_tensor_to_device(model, "blocks.0.first.weight", "cpu")
    set_module_tensor_to_device(model, "blocks.0.first.weight", "cpu", value=value.double())
    found = model.blocks[0].first.weight
    assert torch.equal(found, value) and found.dtype == torch.float32 and not found.requires_grad


def test_dtypes() -> None:
    layer = nn.Linear(2, 2)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2), dtype="float16")
    assert layer.weight.dtype == torch.float16
    set_module_tensor_to_device(layer, "weight", "meta", dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    layer.weight.requires_grad_(False)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2, dtype=torch.int8), dtype=torch.float16)
    assert layer.weight.dtype == torch.int8, "whole numbers are not cast"
    norm = nn.BatchNorm1d(2)
    set_module_tensor_to_device(norm, "running_mean", "cpu", value=torch.ones(2), dtype=torch.float16)
    assert norm.running_mean.dtype == torch.float16 and not isinstance(norm.running_mean, nn.Parameter)


def test_a_tensor_that_is_there_already_is_left_alone() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    set_module_tensor_to_device(layer, "weight", "cpu")
    assert layer.weight is before


def test_wrong_names_and_shapes() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"no parameter or buffer called head\.wait: the Linear .* has weight, bias"):
        set_module_tensor_to_device(model, "head.wait", "cpu")
    with pytest.raises(ValueError, match=r"has shape \(8, 4\), its value has shape \(4, 8\)"):
        set_module_tensor_to_device(model, "head.weight", "cpu", value=torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"head\.bias of this Net is None"):
        set_module_tensor_to_device(model, "head.bias", "cpu", value=torch.ones(8))


@pytest.mark.skipif(is_xpu_available(), reason="needs a machine without an XPU")
def test_an_xpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"head\.weight cannot be put on xpu:0, because this machine has no XPU"):
        set_module_tensor_to_device(Net(), "head.weight", "xpu:0", value=torch.ones(8, 4))


def test_shared_tensors_are_placed_once() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    value = torch.ones(2, 2)
    placed: dict[int, dict[object, torch.Tensor]] = {value.data_ptr(): {}}
    set_module_tensor_to_device(one, "weight", "cpu", value=value, tied_params_map=placed)
    assert placed[value.data_ptr()]["cpu"] is one.weight
    set_module_tensor_to_device(two, "weight", "cpu", value=value, tied_params_map=placed)
    assert two.weight is one.weight


def test_a_view_at_the_address_of_a_shared_tensor_is_not_that_tensor() -> None:
    weight = torch.arange(16.0).view(4, 4)
    module = nn.Module()
    module.whole = nn.Parameter(weight)
    module.rows = nn.Parameter(weight[:2])
    module.turned = nn.Parameter(weight.T)
    placed: dict[int, dict[object, torch.Tensor]] = {weight.data_ptr(): {}}
    for name in ("whole", "rows", "turned"):
        set_module_tensor_to_device(module, name, "cpu:0", tied_params_map=placed)
    assert placed[weight.data_ptr()]["cpu:0"] is module.whole
    assert torch.equal(module.rows, weight[:2]) and torch.equal(module.turned, weight.T)


def test_a_buffer_at_the_address_of_a_shared_parameter_stays_a_buffer() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2, 2))
    module.register_buffer("seen", module.weight.data)
    placed: dict[int, dict[object, torch.Tensor]] = {module.weight.data_ptr(): {}}
    for name in ("weight", "seen"):
        set_module_tensor_to_device(module, name, "cpu", tied_params_map=placed)
    assert list(module._parameters) == ["weight"] and list(module._buffers) == ["seen"]
    assert type(module.seen) is torch.Tensor and torch.equal(module.seen, module.weight)


def test_same_devices() -> None:
    assert check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cuda:1"), torch.device("cuda"))
    assert not check_device_same(torch.device("meta"), torch.device("cpu"))
