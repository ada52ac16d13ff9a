"""What ranks tell each other does not grow with their number, where each of them does it at every step or second."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accelerate.diagnosis import watch
from tests.harness import run_world

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulated, scaling = _module("simulated"), _module("scaling")


@pytest.fixture(scope="module")
def worlds() -> dict[int, Any]:
    """The larger one has three of its ranks, which speak for all."""
    return {size: scaling.simulated(size, threads=size <= 64) for size in (8, 64, 1024)}


@pytest.fixture(params=[8, 64, 1024])
def world(request: pytest.FixtureRequest, worlds: dict[int, Any]) -> Any:
    return worlds[request.param]


def test_a_step_tells_nobody(world: Any) -> None:
    for phase in ("step", "minute of training"):
        found = world["phases"][phase]
        assert found["rank 0"] == found["another rank"] == {}
        assert found["requests to the store"] == found["questions asked again"] == 0  # of all ranks


def test_what_any_rank_asks_counts() -> None:
    phases = scaling.summary([({}, 1), ({"step": Counter({"store add": 1, "store poll": 2})}, 3)])["phases"]
    assert phases["step"]["requests to the store"] == 3
    assert phases["step"]["questions asked again"] == 6


def test_ranks_that_do_not_get_on_keep_the_store_no_busier(world: Any) -> None:
    # A note is a connection and a request.
    assert world["phases"]["minute of working"]["requests to the store"] <= 60 * 2 * watch._NOTES_PER_SECOND
    assert world["phases"]["minute of waiting"]["requests to the store"] <= 2 * world["ranks"]


def test_a_gather_is_one_exchange(world: Any) -> None:
    gather = world["phases"]["gather"]
    assert gather["rank 0"]["all_gather"] == gather["collectives"] == 1
    assert gather["bytes that a rank gets"] <= max(2**20, 1024 * world["ranks"])


def test_a_save_asks_the_store_a_few_times_for_each_rank(world: Any) -> None:
    save, ranks = world["phases"]["save"], world["ranks"]
    assert save["requests to the store"] == 5 * (ranks - 1) + 4
    assert "store poll" not in save["another rank"]
    assert save["collectives"] == (6 if ranks == 8 else 8)  # on one machine, and on several


def test_a_load_reads_the_manifest_once(world: Any) -> None:
    load = world["phases"]["load"]
    assert load["manifests read"] == 1
    assert load["collectives"] == (11 if world["ranks"] == 8 else 12)


def test_an_agreement_to_stop_asks_the_store_a_few_times_for_each_rank(world: Any) -> None:
    assert world["phases"]["stop"]["requests to the store"] == 6 * world["ranks"] + 3


def test_some_ranks_that_speak_for_all_count_as_all_do(worlds: dict[int, Any]) -> None:
    assert scaling.differences(worlds[64], scaling.simulated(64, threads=False)) == []


def _counted(folder: str) -> Any:
    return scaling.counted(folder)


def test_threads_count_as_processes_do(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    counts = run_world(_counted, 2, str(tmp_path))
    assert scaling.differences(scaling.summary([(found, 1) for found in counts]), scaling.simulated(2, True)) == []
