"""Seeds, and random states that become those of rank 0."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from accelerate.random import set_seed, synchronize_rng_state, synchronize_rng_states
from tests.harness import run_world


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_set_seed_repeats_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    set_seed(3)
    first = draw()
    assert draw() != first
    set_seed(3)
    assert draw() == first
    set_seed(4)
    assert all(left != right for left, right in zip(draw(), first, strict=True))


def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def _seeds() -> list[Any]:
    set_seed(3)
    same = draw()
    set_seed(3, device_specific=True)
    return [same, draw()]


def test_device_specific_seeds() -> None:
    first, second = run_world(_seeds, 2)
    assert first[0] == second[0] == first[1]
    assert all(left != right for left, right in zip(first[1], second[1], strict=True))


def _synchronize() -> list[Any]:
    from accelerate.state import PartialState

    rank = PartialState().process_index
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(100 + rank)
    before = [float(torch.rand(())), float(torch.rand((), generator=generator))]
    synchronize_rng_states(["torch", "generator"], generator=generator)
    after = [float(torch.rand(())), float(torch.rand((), generator=generator))]
    synchronize_rng_states(["generator"])  # nothing to do without one
    with pytest.raises(ValueError, match="pass `generator`"):
        synchronize_rng_state("generator")
    with pytest.raises(ValueError, match="dice"):
        synchronize_rng_states(["dice"])
    return [before, after]


def test_random_states_become_those_of_rank_0() -> None:
    results = run_world(_synchronize, 3)
    assert len({tuple(before) for before, _ in results}) == 3
    assert len({tuple(after) for _, after in results}) == 1
    torch.manual_seed(0)
    torch.rand(())
    assert results[1][1][0] == float(torch.rand(()))


def test_one_process_keeps_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    before = torch.get_rng_state()
    synchronize_rng_states(["torch", "generator"], torch.Generator())
    synchronize_rng_state(None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_that_is_no_number_changes_nothing() -> None:
    before = random.getstate()
    with pytest.raises(TypeError, match="`set_seed` takes a whole number, but was given 'abc'"):
        set_seed("abc")  # type: ignore[arg-type]
    assert random.getstate() == before
    set_seed(np.int64(3))  # type: ignore[arg-type]
