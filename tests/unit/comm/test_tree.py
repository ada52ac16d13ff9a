"""Nested data on one process."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch

from accelerate.comm import tree


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Record:
    a: Any
    b: Any


class Movable:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def to(self, device: Any, **kwargs: Any) -> Movable:
        self.calls.append((device, kwargs))
        return self


class Stubborn:
    """An object whose `to` takes nothing but a device."""

    moved: Any = None

    def to(self, device: Any) -> Stubborn:
        self.moved = device
        return self


CONTAINERS: list[Any] = [
    [torch.ones(2)],
    (torch.ones(2),),
    {"a": torch.ones(2)},
    OrderedDict(a=torch.ones(2)),
    defaultdict(list, a=torch.ones(2)),
    UserDict(a=torch.ones(2)),
    Pair(torch.ones(2), 1),
    Record(torch.ones(2), "x"),
    [{"a": (torch.ones(2), [Record(Pair(torch.ones(2), None), 3)])}],
]


@pytest.mark.parametrize("data", CONTAINERS, ids=lambda data: type(data).__name__)
def test_nesting_survives(data: Any) -> None:
    result = tree.recursively_apply(lambda tensor: tensor + 1, data)
    assert type(result) is type(data)
    assert all(leaf.tolist() == [2.0, 2.0] for leaf in tree.leaves(result))
    assert all(leaf.tolist() == [1.0, 1.0] for leaf in tree.leaves(data)), "the input must stay as it was"
    assert len(tree.leaves(result)) == len(tree.leaves(data)) > 0
    moved = tree.send_to_device(data, "meta")
    assert type(moved) is type(data) and all(leaf.device.type == "meta" for leaf in tree.leaves(moved))
    joined = tree.concatenate([data, data]) if type(data) not in (Pair,) and not isinstance(data, list) else None
    if joined is not None:
        assert type(joined) is type(data) and len(tree.leaves(joined)[0]) == 4
    halves = tree.slice_tensors(data, slice(0, 1))
    assert type(halves) is type(data) and all(len(leaf) == 1 for leaf in tree.leaves(halves))
    assert tree.find_batch_size(data) == 2 and tree.find_device(data) == torch.device("cpu")


def test_a_default_dict_keeps_its_factory() -> None:
    result = tree.send_to_device(defaultdict(list, a=torch.ones(1)), "cpu")
    assert result["new"] == []


def test_other_leaves_stay_or_raise() -> None:
    marker = object()
    assert tree.recursively_apply(torch.neg, {"a": marker, "b": None, "c": "x"}) == {"a": marker, "b": None, "c": "x"}
    with pytest.raises(TypeError, match=r"int.*pass a tensor"):
        tree.recursively_apply(torch.neg, [torch.ones(1), 3], error_on_other_type=True)
    found = tree.recursively_apply(lambda x, y, z: x + y + z, [1, "a"], 10, z=100, test_type=lambda x: x == 1)
    assert found == [111, "a"]


def test_honor_type() -> None:
    assert tree.honor_type([], (i for i in range(2))) == [0, 1]
    assert tree.honor_type((), iter([1])) == (1,)
    assert tree.honor_type(Pair(0, 0), iter([1, 2])) == Pair(1, 2)
    assert tree.honor_type(torch.Size([1]), iter([1, 2])) == torch.Size([1, 2])


def test_send_to_device_skips_keys_at_every_depth() -> None:
    data: dict[str, Any] = {
        "a": torch.ones(1),
        "keep": torch.ones(1),
        "in": [{"keep": torch.ones(1), "b": torch.ones(1)}],
    }
    for keys in ("keep", ["keep"]):
        moved = tree.send_to_device(data, "meta", skip_keys=keys)
        assert moved["a"].is_meta and moved["in"][0]["b"].is_meta
        assert moved["keep"] is data["keep"] and moved["in"][0]["keep"] is data["in"][0]["keep"]


def test_send_to_device_calls_to_where_there_is_one() -> None:
    movable, stubborn = Movable(), Stubborn()
    result = tree.send_to_device([movable, stubborn, "text", 3, None, Movable], "cpu", non_blocking=True)
    assert result == [movable, stubborn, "text", 3, None, Movable]
    assert movable.calls == [("cpu", {"non_blocking": True})] and stubborn.moved == "cpu"
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    assert type(tree.send_to_device(packed, "cpu")) is type(packed)


def test_find_batch_size() -> None:
    assert tree.find_batch_size([{"a": ["text", torch.ones(3, 2)]}, torch.ones(5)]) == 3
    assert tree.find_batch_size(torch.ones(0, 2)) == 0
    empties: list[Any] = [[], (), {}]
    for empty in empties:
        with pytest.raises(ValueError, match=type(empty).__name__):
            tree.find_batch_size(empty)
    for nothing in ("text", 3, ["text"], torch.tensor(1.0)):
        with pytest.raises(TypeError, match="batch size"):
            tree.find_batch_size(nothing)
        assert tree.ignorant_find_batch_size(nothing) is None
    assert tree.ignorant_find_batch_size([]) is None
    assert tree.find_device(["text"]) is None


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn],
)
def test_listify(dtype: torch.dtype) -> None:
    data = {"a": torch.tensor([1.0, 0.0]).to(dtype).requires_grad_(dtype.is_floating_point), "b": "text"}
    assert tree.listify(data) == {"a": [1, 0], "b": "text"}
    assert tree.listify(torch.tensor(1.0).to(dtype)) == 1


def test_convert_to_fp32() -> None:
    data: dict[str, Any] = {
        "half": torch.ones(1, dtype=torch.half),
        "bf16": [torch.ones(1, dtype=torch.bfloat16)],
        "double": torch.ones(1, dtype=torch.double),
        "int": torch.ones(1, dtype=torch.int8),
        "text": "x",
    }
    result = tree.convert_to_fp32(data)
    assert result["half"].dtype == result["bf16"][0].dtype == torch.float32
    assert result["double"] is data["double"] and result["int"] is data["int"] and result["text"] == "x"
    assert data["half"].dtype == torch.half


def test_concatenate() -> None:
    parts = [{"a": torch.full((1, 2), i), "b": (torch.tensor([i]),)} for i in range(3)]
    joined = tree.concatenate(parts)
    assert joined["a"].tolist() == [[0, 0], [1, 1], [2, 2]] and joined["b"][0].tolist() == [0, 1, 2]
    assert tree.concatenate([torch.ones(2, 1), torch.ones(2, 2)], dim=1).shape == (2, 3)
    assert tree.concatenate([Pair(torch.ones(1), torch.ones(2))] * 2).b.shape == (4,)
    with pytest.raises(TypeError, match="str"):
        tree.concatenate([{"a": "x"}, {"a": "y"}])
    thing = object()
    assert tree.concatenate([thing]) is thing
    assert tree.concatenate([{"a": "x", "b": [1, torch.ones(1)]}]) == {"a": "x", "b": [1, torch.ones(1)]}


def test_pad_input_tensors() -> None:
    assert tree.pad_input_tensors(torch.tensor([5, 6, 7]), 3, 2).tolist() == [5, 6, 7, 0]
    assert tree.pad_input_tensors(torch.tensor([5, 6]), 2, 8).tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
    assert tree.pad_input_tensors(torch.tensor([[5, 6, 7]]), 3, 2, dim=1).tolist() == [[5, 6, 7, 0]]
    even = torch.arange(4)
    assert tree.pad_input_tensors(even, 4, 2) is even
    data = tree.pad_input_tensors({"a": torch.arange(3), "b": torch.tensor(1), "c": "x"}, 3, 2)
    assert len(data["a"]) == 4 and data["b"].ndim == 0 and data["c"] == "x"


def test_structures_come_back_as_tensors() -> None:
    data = {"a": torch.ones(2, 3, dtype=torch.int16), "b": [torch.tensor(1.0)]}
    assert tree.get_shape(data) == {"a": [2, 3], "b": [[]]}
    made = tree.initialize_tensors(tree.get_data_structure(data))
    assert made["a"].shape == (2, 3) and made["a"].dtype == torch.int16 and made["b"][0].shape == ()


def test_fields_that_are_not_set_stay_so() -> None:
    @dataclasses.dataclass
    class Draft:
        done: torch.Tensor
        later: torch.Tensor = dataclasses.field(init=False)

    draft = Draft(torch.ones(2))
    assert not hasattr(tree.send_to_device(draft, "cpu"), "later")
    assert tree.find_device(draft) == torch.device("cpu")
    assert tree.concatenate([draft, draft]).done.shape == (4,)


def test_arguments_keep_the_dataclasses_that_a_module_writes_into() -> None:
    record = Record(torch.ones(2), {})
    moved = tree.send_arguments_to_device({"x": torch.ones(2), "records": [record]}, "meta")
    assert moved["x"].is_meta and moved["records"][0] is record
    assert tree.send_to_device(record, "meta").a.is_meta


@pytest.mark.parametrize(
    "make", [list, tuple, lambda items: dict(enumerate(items)), lambda items: [[items[0]], *items[1:]]]
)
def test_leaves_are_replaced_in_their_order(make: Any) -> None:
    data = make([torch.zeros(1), torch.zeros(2)])
    values = [torch.ones(1), torch.ones(2)]
    replaced = tree.replace_leaves(data, iter(values))
    assert type(replaced) is type(data) and tree.leaves(replaced) == values
    assert [int(leaf.sum()) for leaf in tree.leaves(data)] == [0, 0]
