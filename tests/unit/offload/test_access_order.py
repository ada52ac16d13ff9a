from __future__ import annotations

import random

import pytest

from accelerate.offload import access_order as module
from accelerate.offload.access_order import END, Order


def run(order: Order[str], sequence: str) -> str:
    """Uses each letter, and the end; returns which of them were foreseen."""
    hits = "".join("+" if order.use(letter) else "-" for letter in sequence)
    return hits + ("+" if order.use(END) else "-")


def test_nothing_is_foreseen_the_first_time() -> None:
    order: Order[str] = Order()
    assert run(order, "abc") == "----"
    assert run(order, "abc") == "++++"


def test_ahead_ends_with_the_forward() -> None:
    order: Order[str] = Order()
    run(order, "abcd")
    run(order, "abcd")
    assert list(order.ahead()) == ["a", "b", "c", "d"]
    order.use("a")
    order.use("b")
    assert list(order.ahead()) == ["c", "d"]
    order.use("c")
    order.use("d")
    assert list(order.ahead()) == []


def test_repeated_blocks_are_counted() -> None:
    """A layer that is used five times and then not is foreseen as exactly that."""
    order: Order[str] = Order()
    run(order, "eaaaaah")
    run(order, "eaaaaah")
    assert run(order, "eaaaaah") == "++++++++"
    order.use("e")
    for left in range(5, 0, -1):
        assert list(order.ahead()) == ["a"] * left + ["h"]
        order.use("a")
    assert list(order.ahead()) == ["h"]


def test_a_change_is_followed_and_doubted() -> None:
    order: Order[str] = Order()
    for _ in range(3):
        run(order, "abcd")
    assert run(order, "abxd") == "++--+"
    # What follows b is not counted on, until it was right twice.
    for times, seen in enumerate((["a", "b"], ["a", "b"], ["a", "b", "x", "d"])):
        assert list(order.ahead()) == seen, times
        run(order, "abxd")


def test_a_step_that_always_differs_is_never_counted_on() -> None:
    """A router that picks experts: what does not depend on it is foreseen, the experts are not."""
    order: Order[str] = Order()
    draw = random.Random(0)
    wrong = 0
    for turn in range(60):
        expert = draw.choice("123456")
        for letter in ("a", "r", expert, "z"):
            guesses = list(order.ahead())
            if turn > 5 and guesses and guesses[0] != letter:
                wrong += 1
            order.use(letter)
        order.use(END)
    assert wrong <= 6


def test_two_ways_into_a_model() -> None:
    """The encoder alone, then several forwards of the decoder, as in generation."""
    order: Order[str] = Order()
    for _ in range(3):
        for letter in "xyz":
            order.use(letter)
        for _ in range(4):
            run(order, "abc")
    order.use("x")
    assert list(order.ahead())[:4] == ["y", "z", "a", "b"]
    order.use("y")
    order.use("z")
    assert run(order, "abc") == "++++"
    assert run(order, "abc") == "++++"


def test_forgets_what_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEEP", 10)
    order: Order[str] = Order()
    for _ in range(200):
        run(order, "abcde")
    assert run(order, "abcde") == "++++++"
    assert len(order._log) < 40
    run(order, "edcba")
    run(order, "edcba")
    assert run(order, "edcba") == "++++++"
