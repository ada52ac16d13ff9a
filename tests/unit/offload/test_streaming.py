"""Which blocks are where, with a copier that only takes notes."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from accelerate.offload.slot import Slot
from accelerate.offload.streaming import SMALL, Block, Streamer

LARGE = SMALL // 4 + 1  # floats


class FakeCopy:
    def __init__(self, copier: FakeCopier, slots: list[Slot]) -> None:
        self.copier = copier
        self.slots = slots

    def wait(self) -> list[torch.Tensor]:
        return [slot.value() for slot in self.slots]

    def cancel(self) -> None:
        self.copier.cancelled += [slot.name for slot in self.slots]


class FakeCopier:
    def __init__(self, lookahead: int = 2, room: int = 1000) -> None:
        self.lookahead = lookahead
        self.room = room
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.prepared: list[str] = []
        self.streamer = Streamer(self)

    def prepare(self, slots: list[Slot]) -> None:
        self.prepared += [slot.name for slot in slots]

    def start(self, slots: list[Slot]) -> FakeCopy:
        there = len(self.streamer._coming) + len(self.streamer._in_use)
        if there >= self.room:
            raise torch.OutOfMemoryError("no room")
        self.started += [slot.name for slot in slots]
        return FakeCopy(self, slots)


class Model:
    """Blocks with names, and the layers that they belong to."""

    def __init__(self, names: str, copier: FakeCopier | None = None, small: str = "") -> None:
        self.copier = copier or FakeCopier()
        self.streamer = self.copier.streamer
        self.layers = {name: nn.Linear(1, 4 if name in small else LARGE, bias=False) for name in names}
        self.weights = {name: layer.weight.detach() for name, layer in self.layers.items()}
        device = torch.device("cpu")
        self.blocks = {
            name: Block([Slot(layer, "weight", self.weights, name, device, device)])
            for name, layer in self.layers.items()
        }
        for block in self.blocks.values():
            self.streamer.add(block)
        self.most = 0

    def coming(self) -> str:
        return "".join(slot.name for block in self.streamer._coming for slot in block.slots)

    def forward(self, order: str) -> str:
        """Returns what was copied meanwhile."""
        self.copier.started.clear()
        self.streamer.begin()
        for name in order:
            self.streamer.enter(self.blocks[name])
            assert torch.equal(self.layers[name].weight, self.weights[name])
            beyond = [block for block in self.streamer._coming if block.nbytes >= SMALL]
            self.most = max(self.most, len(beyond))
            self.streamer.leave(self.blocks[name])
            assert self.layers[name].weight.is_meta
        self.streamer.end()
        assert self.coming() == ""
        return "".join(self.copier.started)


def test_comes_when_asked_for_the_first_time() -> None:
    model = Model("abcd")
    assert model.forward("abcd") == "abcd"
    assert model.most == 0
    assert model.copier.prepared == ["a", "b", "c", "d"]


def test_two_blocks_ahead_once_the_order_is_known() -> None:
    model = Model("abcde")
    model.forward("abcde")
    model.forward("abcde")
    model.streamer.begin()
    assert model.coming() == "ab"
    for name, ahead in zip("abcde", ("bc", "cd", "de", "e", ""), strict=True):
        model.streamer.enter(model.blocks[name])
        assert model.coming() == ahead
        model.streamer.leave(model.blocks[name])
    model.streamer.end()
    assert model.forward("abcde") == "abcde"  # each once
    assert model.most == 2
    assert model.copier.cancelled == []


def test_small_blocks_come_along() -> None:
    model = Model("abcdefg", small="bce")
    for _ in range(2):
        model.forward("abcdefg")
    model.streamer.begin()
    assert model.coming() == "abcd" + "e"
    model.streamer.enter(model.blocks["a"])
    assert model.coming() == "bcdef"
    assert model.most <= 2


def test_a_block_that_is_used_again_at_once_stays() -> None:
    model = Model("abc")
    for _ in range(2):
        model.forward("abbbbc")
    assert model.forward("abbbbc") == "abc"


def test_a_changed_order_costs_at_most_what_was_ahead() -> None:
    model = Model("abcdefgh")
    for _ in range(3):
        model.forward("abcdef")
    copied = model.forward("abhgef")
    assert sorted(set(copied) - set("abhgef")) in (["c"], ["c", "d"])
    assert sorted(model.copier.cancelled) == ["c", "d"]
    # The new order is followed without further waste.
    for _ in range(4):
        assert sorted(model.forward("abhgef")) == sorted("abhgef")
    assert model.most <= 2


def test_random_orders() -> None:
    draw = random.Random(3)
    model = Model("abcdefghijkl")
    uses = copies = 0
    for _ in range(100):
        order = "a" + "".join(draw.sample("bcdefghijk", 5)) + "l"
        uses += len(order)
        copies += len(model.forward(order))
    assert model.most <= 2
    assert copies <= uses * 1.15


def test_too_little_room_means_fewer_blocks_ahead() -> None:
    model = Model("abcd", FakeCopier(room=2))
    for _ in range(4):
        assert sorted(set(model.forward("abcd"))) == list("abcd")
    assert model.most == 1
    tight = Model("abcd", FakeCopier(room=1))
    for _ in range(4):
        assert sorted(set(tight.forward("abcd"))) == list("abcd")


def test_no_room_at_all_is_an_error() -> None:
    model = Model("a", FakeCopier(room=0))
    with pytest.raises(torch.OutOfMemoryError):
        model.forward("a")


def test_a_block_that_failed_to_come_is_asked_for_again() -> None:
    model = Model("ab", FakeCopier(room=0))
    with pytest.raises(torch.OutOfMemoryError):
        model.forward("ab")
    model.copier.room = 1000
    assert model.forward("ab") == "ab"


def test_copiers_that_gain_nothing_are_not_asked_to_look_ahead() -> None:
    model = Model("abc", FakeCopier(lookahead=0))
    for _ in range(3):
        assert model.forward("abc") == "abc"
        assert model.most == 0


def test_nested_uses() -> None:
    model = Model("ab")
    outer, inner = model.blocks["a"], model.blocks["b"]
    for _ in range(3):
        model.streamer.begin()
        model.streamer.enter(outer)
        model.streamer.enter(inner)
        model.streamer.enter(outer)
        model.streamer.leave(outer)
        assert not model.layers["a"].weight.is_meta
        model.streamer.leave(inner)
        model.streamer.leave(outer)
        assert model.layers["a"].weight.is_meta
        model.streamer.end()


def test_what_an_exception_left_is_taken_out_at_the_next_begin() -> None:
    model = Model("abc")
    model.forward("abc")
    model.streamer.begin()
    model.streamer.enter(model.blocks["a"])
    model.streamer.begin()
    assert model.layers["a"].weight.is_meta
    model.streamer.leave(model.blocks["a"])  # of the outer forward, should it still be running
    assert model.forward("abc")


def test_real_tensors_are_left_alone() -> None:
    model = Model("ab")
    mine = nn.Parameter(torch.zeros(LARGE, 1))
    model.layers["a"].weight = mine
    model.weights["a"] = mine.detach()
    model.copier.started.clear()
    model.streamer.enter(model.blocks["a"])
    model.streamer.leave(model.blocks["a"])
    assert model.layers["a"].weight is mine
    assert model.copier.started == []


def test_discarded_blocks_leave() -> None:
    model = Model("abc")
    for _ in range(2):
        model.forward("abc")
    model.streamer.begin()
    assert "a" in model.coming()
    model.streamer.discard(model.blocks["a"])
    assert "a" not in model.coming()
    model.streamer.enter(model.blocks["b"])
    model.streamer.discard(model.blocks["b"])
    assert model.layers["b"].weight.is_meta


def test_a_copy_learns_for_itself() -> None:
    model = Model("abc")
    model.forward("abc")
    other = copy.deepcopy(model.streamer)
    assert len(other._known) == 3
    assert not set(other._known) & set(model.blocks.values())
    assert list(other._order.ahead()) == []


def test_every_user_of_a_block_waits_for_its_copy() -> None:
    """Who comes second may be another thread, with a stream of its own."""
    waits = []

    class Waited(FakeCopy):
        def wait(self) -> list[torch.Tensor]:
            waits.append(self.slots[0].name)
            return super().wait()

    class Waiting(FakeCopier):
        def start(self, slots: list[Slot]) -> FakeCopy:
            return Waited(self, slots)

    model = Model("a", Waiting())
    model.streamer.enter(model.blocks["a"])
    weight = model.layers["a"].weight
    model.streamer.enter(model.blocks["a"])
    assert waits == ["a", "a"] and model.layers["a"].weight is weight
