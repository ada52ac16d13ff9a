from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

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


def test_threads_do_not_disturb_each_other() -> None:
    """The second begins before the first ends, and ends after it."""

    def attributes() -> list[Any]:
        return [
            nn.Module.register_parameter,
            nn.Module.register_buffer,
            nn.Module.__setattr__,
            nn.init.kaiming_uniform_,
            nn.Linear.reset_parameters,
        ]

    before = attributes()
    first_begun, second_begun, first_ended = (threading.Event() for _ in range(3))
    made = []

    def first() -> None:
        with init_empty_weights(include_buffers=True):
            first_begun.set()
            assert second_begun.wait(10)
            made.append(nn.BatchNorm1d(2))
        made.append(nn.BatchNorm1d(2))
        first_ended.set()

    def second() -> None:
        assert first_begun.wait(10)
        made.append(nn.BatchNorm1d(2))
        with init_empty_weights():
            made.append(nn.BatchNorm1d(2))
            second_begun.set()
            assert first_ended.wait(10)
            made.append(nn.BatchNorm1d(2))

    with ThreadPoolExecutor(2) as pool:
        for running in [pool.submit(first), pool.submit(second)]:
            running.result()
    assert [module.weight.is_meta for module in made] == [False, True, True, False, True]
    assert [module.running_mean.is_meta for module in made] == [False, False, True, False, False]
    assert attributes() == before and not nn.Linear(2, 2).weight.is_meta


def test_initializers_still_fill_what_has_memory() -> None:
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
    with init_on_device("meta", include_buffers=True):
        module = nn.Module()
        module.register_buffer("new", torch.ones(2), persistent=False)
        module.register_buffer("named", torch.ones(2, device="cpu"))
        module.register_buffer("none", None)
    assert module.new.is_meta and not module.named.is_meta and module.none is None
    with init_on_device(torch.device("cpu")):
        layer = nn.Linear(2, 2)
    assert layer.weight.device.type == "cpu" and layer.weight.abs().sum() > 0


class Odd(nn.Module):
    """Sets attributes in every way that is not the usual one."""

    taken = 1

    def __init__(self) -> None:
        super().__init__()
        self.doubled = 3
        self.layer = nn.Linear(2, 2)
        self.layer.bias = None
        self.other = nn.Linear(2, 2)
        self.other = None
        self.register_buffer("steps", torch.ones(1))
        self.steps = None
        self.note = "text"
        self.note = nn.Parameter(torch.ones(2))

    @property
    def doubled(self) -> int:
        return self._doubled

    @doubled.setter
    def doubled(self, value: int) -> None:
        self._doubled = 2 * value


def test_attributes_are_set_as_outside_of_it() -> None:
    with init_empty_weights():
        empty = Odd()
    plain = Odd()
    for model in (empty, plain):
        assert model.doubled == 6 and model.layer.bias is None and model.other is None and model.steps is None
        assert [name for name, _ in model.named_parameters()] == ["note", "layer.weight"]
        assert sorted(vars(model)) == sorted(vars(plain))
    assert empty.note.is_meta and not plain.note.is_meta


@pytest.mark.parametrize("name, error", [("taken", KeyError), ("a.b", KeyError), ("layer", None)])
def test_a_parameter_under_a_wrong_name_is_refused_as_outside_of_it(name: str, error: type[Exception] | None) -> None:
    with init_empty_weights():
        model = Odd()
        if error is None:
            setattr(model, name, nn.Parameter(torch.ones(3)))
            assert model.layer.is_meta and "layer" not in model._modules
        else:
            with pytest.raises(error):
                setattr(model, name, nn.Parameter(torch.ones(3)))


def test_a_parameter_before_the_module_is_made_and_one_with_a_history_are_refused() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            self.p = nn.Parameter(torch.ones(1))

    with init_empty_weights():
        with pytest.raises(AttributeError):
            Early()
        derived = nn.Parameter(torch.ones(1), requires_grad=False)
        derived.mul_(torch.ones(1, requires_grad=True))
        with pytest.raises(ValueError):
            nn.Linear(2, 2).p = derived


def test_a_module_that_registers_in_its_own_way_does() -> None:
    class Counting(nn.Module):
        count = 0

        def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
            self.count += 1
            super().register_parameter(name, param)

    seen = []

    def frozen(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        seen.append(name)
        return nn.Parameter(parameter.detach(), requires_grad=False)

    hook = nn.modules.module.register_module_parameter_registration_hook(frozen)
    try:
        with init_empty_weights():
            module = Counting()
            module.p = nn.Parameter(torch.ones(1))
            nn.Linear(2, 2)
    finally:
        hook.remove()
    assert module.count == 1 and module.p.is_meta and not module.p.requires_grad
    assert seen == ["p", "weight", "bias"]


def test_what_has_memory_is_reset_and_what_has_none_is_left() -> None:
    ready = nn.Linear(2, 2)
    before = ready.weight.detach().clone()
    with init_empty_weights():
        norm = nn.BatchNorm1d(3)
        norm.running_mean.fill_(5)
        norm.reset_parameters()
        ready.reset_parameters()
        nn.Embedding(4, 2, padding_idx=0).reset_parameters()
    assert norm.running_mean.sum() == 0 and norm.weight.is_meta
    assert not torch.equal(ready.weight, before)


def test_what_the_collector_of_garbage_was_told_still_holds() -> None:
    """Cycles that are built inside are found later, and frozen objects stay frozen."""

    class Cyclic:
        def __init__(self) -> None:
            self.itself = self

    def build() -> weakref.ref[Cyclic]:
        with init_empty_weights():
            return weakref.ref(Cyclic())

    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    lost = build()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert lost() is None
    gc.freeze()
    build()
    assert gc.get_freeze_count() > 0
    if not was_frozen:
        gc.unfreeze()


def test_layers_that_find_their_shapes_later_are_left_to_that() -> None:
    """Their parameters have no memory yet."""
    with init_empty_weights():
        layer = nn.LazyLinear(4)
    assert layer.weight.is_meta and is_lazy(layer.weight) and not is_lazy(nn.Linear(2, 2).weight)
    with init_on_device("cpu"):
        assert nn.LazyLinear(4)(torch.ones(2, 3)).shape == (2, 4)


def test_with_buffers_nothing_of_torch_is_replaced() -> None:
    names = ("register_parameter", "register_buffer", "__setattr__")
    before = [getattr(nn.Module, name) for name in names]
    with init_empty_weights(include_buffers=True):
        assert [getattr(nn.Module, name) for name in names] == before
        assert nn.Linear(2, 2).weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta
