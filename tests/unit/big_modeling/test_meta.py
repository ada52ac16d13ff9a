from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from accelerate import init_empty_weights, init_on_device
from accelerate.utils.modeling import find_tied_parameters
from tests.unit.big_modeling.models import Net


@pytest.mark.parametrize("include_buffers", [False, True])
def test_parameters_have_no_memory(include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        model = Net()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(buffer.is_meta is include_buffers for buffer in model.buffers())
    assert model.norm.num_batches_tracked.dtype == torch.int64
    if not include_buffers:
        assert model.scale.item() == 2.0


@pytest.mark.parametrize("include_buffers", [False, True])
def test_ties_survive(include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        model = Net()
        shared = nn.Parameter(torch.ones(3))
        model.one, model.two = nn.Module(), nn.Module()
        model.one.p = model.two.p = shared
    assert model.head.weight is model.embed.weight
    assert model.one.p is model.two.p and model.one.p.is_meta
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"], ["one.p", "two.p"]]


def test_the_class_of_a_parameter_its_attributes_and_its_gradient_flag_are_kept() -> None:
    class Special(nn.Parameter):
        pass

    with init_empty_weights():
        module = nn.Module()
        parameter = Special(torch.ones(2), requires_grad=False)
        parameter.note = "mine"
        module.p = parameter
        plain = nn.Parameter(torch.ones(2))
        plain.note = "too"
        module.q = plain
        module.register_parameter("none", None)
    assert type(module.p) is Special and module.p.is_meta and module.p.note == "mine" and not module.p.requires_grad
    assert module.q.note == "too" and module.q.requires_grad and module.none is None


def test_all_is_as_before_afterwards() -> None:
    before = nn.Module.register_parameter, nn.Module.register_buffer, nn.init.kaiming_uniform_, gc.isenabled()
    with pytest.raises(KeyError):
        with init_empty_weights(include_buffers=True):
            raise KeyError
    assert (nn.Module.register_parameter, nn.Module.register_buffer, nn.init.kaiming_uniform_, gc.isenabled()) == before
    assert not nn.Linear(2, 2).weight.is_meta


def test_initialisers_still_fill_what_has_memory() -> None:
    with init_empty_weights():
        tensor = nn.init.ones_(torch.zeros(3))
        empty = nn.init.ones_(torch.zeros(3, device="meta"))
    assert tensor.sum() == 3 and empty.is_meta


def test_the_default_for_buffers_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert nn.BatchNorm1d(2).running_mean.is_meta
    with init_empty_weights(include_buffers=False):
        assert not nn.BatchNorm1d(2).running_mean.is_meta


def test_on_another_device() -> None:
    ready = torch.ones(2)
    with init_on_device("meta", include_buffers=True):
        module = nn.Module()
        module.register_buffer("ready", ready, persistent=False)
        module.register_buffer("none", None)
    assert module.ready.is_meta and module.none is None and "ready" not in module.state_dict()
    with init_on_device(torch.device("cpu")):
        layer = nn.Linear(2, 2)
    assert layer.weight.device.type == "cpu" and layer.weight.abs().sum() > 0
