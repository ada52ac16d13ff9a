"""The maps of fixed models; those of many random ones are compared with the released package in tests/peer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import modeling
from tests.unit.big_modeling.models import Block, Net

# Bytes: embed and head (tied) 128, each block 144, norm 72, scale 4; in all 636 with three blocks.


def test_all_on_one_device() -> None:
    assert infer_auto_device_map(Net(), {0: 10_000}) == {"": 0}


def test_in_order_with_room_for_the_biggest_layer() -> None:
    # On 0, 144 are kept for a block; 128 of the rest are for embed and head, and 144 for a block.
    found = infer_auto_device_map(Net(), {0: 420, "cpu": 10_000}, no_split_module_classes="Block", offload_buffers=True)
    assert found == {
        "embed": 0,
        "head": 0,
        "blocks.0": 0,
        "blocks.1": "cpu",
        "blocks.2": "cpu",
        "norm": "cpu",
        "scale": "cpu",
    }


def test_three_devices_and_the_disk() -> None:
    limits = {0: 420, 1: 150, "cpu": 160}
    found = infer_auto_device_map(Net(), limits, no_split_module_classes=["Block"], offload_buffers=True)
    assert found == {
        "embed": 0,
        "head": 0,
        "blocks.0": 0,
        "blocks.1": 1,
        "blocks.2": "disk",
        "norm": "disk",
        "scale": "disk",
    }


def test_blocks_are_split_unless_told_not_to() -> None:
    found = infer_auto_device_map(Net(tied=False), {0: 340, "cpu": 10_000}, offload_buffers=True)
    assert found["blocks.0.first"] == 0 and found["blocks.0.second"] == "cpu"


def test_a_split_module_keeps_its_buffers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.inner = nn.ModuleList(nn.Linear(4, width, bias=False) for width in (2, 4, 4))

    model = nn.Sequential(Counting())
    found = infer_auto_device_map(model, {0: 130, "cpu": 1000}, offload_buffers=True)
    assert found == {"0.count": 0, "0.inner.0": 0, "0.inner.1": "cpu", "0.inner.2": "cpu"}
    modeling.check_device_map(model, found)


def test_ties_go_together_even_where_names_look_alike() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(12)]
    layers[11].weight = layers[3].weight
    model = nn.Sequential(*layers)
    found = infer_auto_device_map(model, {0: 64 * 3 + 64, "cpu": 10_000}, clean_result=False)
    assert found["3"] == found["11"] == "cpu"
    assert [name for name, device in found.items() if device == 0] == ["0", "1", "2"], "1 has nothing to do with 11"


def test_what_is_tied_is_split_where_it_does_not_fit_whole() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(4, 4)
    model.rest = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    model.rest[1].weight = model.embed.weight
    found = infer_auto_device_map(model, {0: 64 + 128 + 10, "cpu": 10_000}, clean_result=False)
    assert found["embed"] == found["rest.1"] == 0
    assert found["rest.0"] == found["rest.2"] == "cpu"


def test_tied_tensors_of_the_model_itself() -> None:
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(4))
    model.two = model.one
    model.layer = nn.Linear(4, 4)
    assert infer_auto_device_map(model, {"cpu": 10_000}) == {"": "cpu"}


def test_a_later_module_fills_an_empty_device() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(10, 10, bias=False))
    limits = {0: 420, 1: 10_000}
    assert infer_auto_device_map(model, limits) == {"": 1}
    assert infer_auto_device_map(model, limits, fallback_allocation=True) == {"1": 0, "0": 1, "2": 1}


def test_fallback_allocation_by_hand() -> None:
    model = Net()
    sizes = modeling.compute_module_sizes(model)
    name, part, rest = modeling.fallback_allocate(list(model.named_children()), sizes, 90)
    assert name == "blocks.0.first" and part is model.blocks[0].first
    assert [n for n, _ in rest] == ["embed", "blocks.0.second", "blocks.1", "blocks.2", "norm", "head"]
    modules = list(model.named_children())
    assert (
        modeling.fallback_allocate(modules, sizes, 90, ["Block", "BatchNorm1d"], [["embed.weight", "head.weight"]])[0]
        == "norm"
    )
    assert modeling.fallback_allocate(modules, sizes, 1, [], [["embed.weight", "head.weight"]]) == (None, None, modules)


def test_size_with_ties() -> None:
    model = Net()
    sizes = modeling.compute_module_sizes(model)
    parts = list(model.named_children())
    assert modeling.get_module_size_with_ties(["norm.weight", "norm.bias"], 10, sizes, parts) == (
        82,
        ["norm"],
        [model.norm],
    )
    assert modeling.get_module_size_with_ties([], 10, sizes, parts) == (10, [], [])


def test_a_tied_group_is_counted_once() -> None:
    layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(15)])
    for layer in layers:
        layer.weight = layers[0].weight
    others = [str(number) for number in range(1, 15)]
    weights = sorted(f"{name}.weight" for name in others)
    each = dict.fromkeys(["0", *others], 440) | dict.fromkeys(["0.weight", *weights], 400)
    for sizes in (each, modeling.compute_module_sizes(layers)):
        size, names, modules = modeling.get_module_size_with_ties(weights, 440, sizes, list(layers.named_children()))
        assert (size, sorted(names), len(modules)) == (1000, sorted(others), 14)
    # Counted where it comes first, and that is not the module at hand.
    sizes = modeling.compute_module_sizes(layers)
    assert modeling.get_module_size_with_ties(["0.weight"], 40, sizes, list(layers.named_children()))[0] == 480


def test_half_the_size_in_half_precision() -> None:
    limits = {0: 420, "cpu": 10_000}
    plain = infer_auto_device_map(Net(), limits, offload_buffers=True)
    assert infer_auto_device_map(Net(), limits, dtype="float16", offload_buffers=True) != plain
    special = {name: torch.float16 for name, _ in Net().named_parameters()}
    assert infer_auto_device_map(Net(), limits, special_dtypes=special, offload_buffers=True) != plain


def test_empty_models_have_the_same_map() -> None:
    with init_empty_weights(include_buffers=True):
        model = Net()
    limits = {0: 420, 1: 150, "cpu": 160}
    assert infer_auto_device_map(model, limits, offload_buffers=True) == infer_auto_device_map(
        Net(), limits, offload_buffers=True
    )


def test_every_decision_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(
        Net(), {0: 420, "cpu": 160}, no_split_module_classes=["Block"], offload_buffers=True, verbose=True
    )
    told = capsys.readouterr().out
    assert "goes on 0 with head" in told and "cannot be split: on to cpu" in told and "blocks.2" in told


def test_short_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="accelerate.big_modeling.device_map"):
        infer_auto_device_map(Net(), {0: 50, "cpu": 10_000}, ["Block"], offload_buffers=True)
    assert caplog.messages[-1].startswith("No module fits on 0 (needs 272 bytes, has 50 bytes)")


@pytest.mark.parametrize("limits", [{"cpu": 420, "disk": 300}, {"cpu": 0, "disk": 0}, {"disk": 100}])
def test_the_disk_has_no_end(limits: dict[int | str, int | str]) -> None:
    """As in 1.15, which plans the same for {"disk": 0}."""
    found = infer_auto_device_map(Net(), limits, offload_buffers=True)
    without = {device: limit for device, limit in limits.items() if device != "disk"} or {"cpu": 0}
    assert found == infer_auto_device_map(Net(), without, offload_buffers=True)


def test_buffers_that_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(100), nn.BatchNorm1d(100))
    limits: dict[Any, int] = {0: 80 + 1700, "cpu": 100_000}
    with pytest.warns(UserWarning, match="1.58 KiB of buffers"):
        infer_auto_device_map(model, {0: 80 + 1608, "cpu": 100_000})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(model, limits, offload_buffers=True)


def test_a_big_model_is_planned_in_linear_time() -> None:
    """Steps, not seconds: each module is looked at a few times, however many there are."""
    from accelerate.big_modeling import layers

    looks = []
    for count in (40, 400):
        model = nn.Sequential(*[Block() for _ in range(count)])
        found = 0
        plain = layers.BiggestLayer._find

        def counted(self: Any, without: range, plain: Any = plain) -> None:
            nonlocal found
            found += 1 + len(without)
            plain(self, without)

        layers.BiggestLayer._find = counted  # type: ignore[method-assign]
        try:
            infer_auto_device_map(model, {0: 144 * count // 3, 1: 144 * count // 3, "cpu": 144 * count})
        finally:
            layers.BiggestLayer._find = plain  # type: ignore[method-assign]
        looks.append(found)
    assert looks[1] < 20 * looks[0]


def test_check_device_map() -> None:
    model = Net()
    modeling.check_device_map(model, {"": 0})
    with pytest.raises(ValueError, match=r"no device for blocks\.0\.first\.weight, .* of this Net: add them"):
        modeling.check_device_map(model, {"embed": 0, "norm": 0, "head": 0})
    alone = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no device for bias of this Linear: add it, a module that contains it"):
        modeling.check_device_map(alone, {"weight": 0})
    with pytest.warns(UserWarning, match=r"names block \(did you mean `blocks`\?\), which this Net does not have"):
        modeling.check_device_map(model, {"": 0, "block": 1})
    modeling.check_device_map(model, {"embed.weight": 0, "blocks": 0, "norm": "cpu", "head": "disk"})


def test_a_buffer_that_is_not_saved_may_be_named(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(3), persistent=False)
    modeling.check_device_map(model, {"weight": "cpu", "bias": "cpu", "mask": "cpu"})
    assert not recwarn


def test_clean_device_map() -> None:
    plan = {"a.b": 1, "a.c": 1, "d.e.x": 2, "d.e.y": 2, "d.f": 3}
    assert modeling.clean_device_map(plan) is plan
    assert plan == {"a": 1, "d.e": 2, "d.f": 3}
    assert modeling.clean_device_map({"a.b": 1, "a.c": 1}) == {"": 1}
    assert modeling.clean_device_map({"a.b": 1, "a.c": 1, "d.e": 1, "d.f": 1}, module_name="a") == {
        "a": 1,
        "d.e": 1,
        "d.f": 1,
    }
    assert modeling.clean_device_map({"a.b": 1}) == {"a.b": 1}
    assert modeling.clean_device_map({"a": 0, "a.b": 1, "a.c": 1}) == {"a": 0, "a.b": 1, "a.c": 1}


def test_modules_and_tensors_with_two_names_in_one_parent() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4, bias=False)  # 64 bytes
            self.block = Block()  # 144
            self.same = self.one
            self.again = self.block
            self.register_buffer("mean", torch.zeros(2))  # 8
            self.register_buffer("average", self.mean)
            self.last = nn.Linear(4, 4, bias=False)
            self.end = self.last

    whole = {"one": "cpu", "same": "cpu", "block": "cpu", "again": "cpu", "last": "cpu", "end": "cpu"}
    found = infer_auto_device_map(Twice(), {"cpu": 10_000}, clean_result=False)
    assert found == {**whole, "mean": "cpu", "average": "cpu"}
    # 80 are kept for the biggest layer, block.first.
    found = infer_auto_device_map(Twice(), {"cpu": 80 + 64 + 80})
    assert found == {
        "one": "cpu",
        "same": "cpu",
        "block.first": "cpu",
        "block.second": "disk",
        "again.first": "cpu",
        "again.second": "disk",
        "last": "disk",
        "end": "disk",
        "mean": "disk",
        "average": "disk",
    }
    modeling.check_device_map(Twice(), found)


def test_of_very_many_names_some_are_shown() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(100)))
    with pytest.raises(ValueError, match=r"no device for 1\.weight, .*, 16\.weight and 83 more of this Sequential:"):
        modeling.check_device_map(model, {"0": "cpu"})
    with pytest.warns(UserWarning, match="names nobody, which this Sequential does not have") as caught:
        modeling.check_device_map(model, {"": "cpu", "nobody": "cpu"})
    assert caught[0].filename == __file__
