"""ACCELERATE_DEBUG_MODE: every rank says who differs, before the collective would hang or mix things up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.comm import ops
from accelerate.errors import DistributedOperationException
from accelerate.state import PartialState
from tests.harness import run_world

DEBUG = {"ACCELERATE_DEBUG_MODE": "true"}


def _try(kind: str) -> str:
    state = PartialState()
    assert state.debug
    odd = state.process_index == 1
    one = torch.ones(2, 3)
    calls: dict[str, Any] = {
        "operation": lambda: ops.reduce(one) if odd else ops.gather(one),
        "objects": lambda: ops.gather_object([1]) if odd else ops.broadcast(one),
        "reduce shape": lambda: ops.reduce(torch.ones(2 + odd)),
        "broadcast shape": lambda: ops.broadcast({"a": [torch.ones(2, 3 + odd)]}),
        "broadcast dtype": lambda: ops.broadcast(one.to(torch.int64 if odd else torch.float32)),
        "gather trailing": lambda: ops.gather((one, torch.ones(2, 3 + odd))),
        "gather number": lambda: ops.gather([one] * (1 + odd)),
        "pad dims": lambda: ops.pad_across_processes(torch.ones(2) if odd else one),
        "gather keys": lambda: ops.gather({"b" if odd else "a": one}),
        "reduce keys": lambda: ops.reduce([{"b" if odd else "a": one}]),
        "by keyword": lambda: ops.reduce(tensor=torch.ones(2 + odd), reduction="sum"),
    }
    try:
        calls[kind]()
    except DistributedOperationException as error:
        assert ops.gather(torch.tensor(state.process_index)).tolist() == list(range(state.num_processes))
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "kind",
    [
        "operation",
        "objects",
        "reduce shape",
        "broadcast shape",
        "broadcast dtype",
        "gather trailing",
        "gather number",
        "pad dims",
        "gather keys",
        "reduce keys",
        "by keyword",
    ],
)
def test_every_rank_raises_and_names_the_one_that_differs(kind: str) -> None:
    texts = run_world(_try, 3, kind, env=DEBUG)
    assert len(set(texts)) == 1
    assert "rank 1 differs" in texts[0]
    for rank in range(3):
        assert f"rank {rank}: " in texts[0]


def test_the_error_shows_operations_shapes_and_dtypes() -> None:
    (text, _) = run_world(_try, 2, "operation", env=DEBUG)
    assert "rank 0: gather of float32[2, 3]" in text and "rank 1: reduce of float32[2, 3]" in text
    (text, _) = run_world(_try, 2, "reduce keys", env=DEBUG)
    assert "rank 0: reduce of float32[2, 3] with the keys a (" in text and "with the keys b (" in text


def _what_fits() -> None:
    state = PartialState()
    rank = state.process_index
    assert ops.gather(torch.ones(rank, 2)).shape == (1, 2)
    assert ops.pad_across_processes(torch.ones(2, rank + 1), dim=1).shape == (2, 2)
    assert ops.gather_object([rank] * rank) == [1]
    assert ops.broadcast_object_list([rank], 1) == [1]
    assert ops.reduce({"a": torch.tensor(rank)}, "sum")["a"].item() == 1
    assert ops.broadcast(torch.tensor(rank), from_process=1).item() == 1
    state.wait_for_everyone()
    with state.main_process_first():
        pass


def test_what_works_without_debug_mode_works_with_it() -> None:
    run_world(_what_fits, 2, env=DEBUG)


def test_one_process_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    assert PartialState().debug
    assert ops.gather({"a": "text"}) == {"a": "text"}
