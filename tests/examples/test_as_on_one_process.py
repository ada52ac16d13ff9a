"""Examples that end on several processes with the very numbers of one."""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any

import pytest

from tests.docs.runner import PLAIN_PROCESS
from tests.examples.running import EXAMPLES
from tests.harness import run_world, world_outcomes


def call(name: str, function: str, *args: Any) -> Any:
    """On a rank: a function of an example."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))[function](*args)


def on(processes: int, *args: Any) -> list[Any]:
    env = PLAIN_PROCESS if processes == 1 else None
    results: list[Any] = run_world(call, processes, *args, env=env)
    return results


@functools.cache
def sharding_alone() -> float:
    """The loss that training on one process ends with."""
    (loss,) = on(1, "sharding", "train", 2, 1, 1, 2, 32)
    return float(loss)


def test_accumulation_ends_alike_on_one_process_and_on_two() -> None:
    (alone,) = on(1, "gradient_accumulation", "train", 3, 4)
    together = on(2, "gradient_accumulation", "train", 3, 2)
    assert alone < 2.0  # it has learned something: guessing gives 3.0
    assert together == pytest.approx([alone, alone], rel=1e-5)


def test_evaluation_is_exact() -> None:
    (alone,) = on(1, "evaluation", "evaluate", 64)
    together = on(2, "evaluation", "evaluate", 50)
    assert alone[0] == 1797
    assert 0.9 < alone[1] < 1.0
    assert together == [alone, alone]


@pytest.mark.parametrize(
    ("processes", "args"),
    [(2, (2, 1, 1)), (2, (1, 1, 1)), (4, (2, 2, 1)), (4, (2, 1, 2))],
    ids=["fsdp2", "fsdp1", "copies", "split"],
)
def test_sharded_training_ends_as_on_one_process(processes: int, args: tuple[int, int, int]) -> None:
    shares = processes // args[2]
    together = on(processes, "sharding", "train", *args, 2, 32 // shares)
    assert together == pytest.approx([sharding_alone()] * processes, rel=1e-4)


def test_split_layers_end_as_on_one_process() -> None:
    assert on(2, "sharding", "train", 2, 1, 2, 2, 32) == pytest.approx([sharding_alone()] * 2, rel=1e-4)


def test_cut_sequences_end_as_on_one_process() -> None:
    (alone,) = on(1, "sharding_sequences", "train", 1, "allgather", 2, 16)
    assert alone < 2.0  # guessing gives 3.5
    assert on(2, "sharding_sequences", "train", 2, "allgather", 2, 16) == pytest.approx([alone] * 2, rel=1e-4)
    assert on(4, "sharding_sequences", "train", 2, "alltoall", 2, 8) == pytest.approx([alone] * 4, rel=1e-4)


def test_stages_answer_as_the_whole_model() -> None:
    (alone,) = on(1, "sharding_pipeline", "infer")
    assert len(alone) == 24 and on(2, "sharding_pipeline", "infer") == [alone, alone]


@pytest.mark.parametrize(
    "name", ["evaluation", "gradient_accumulation", "sharding", "sharding_pipeline", "sharding_sequences"]
)
def test_as_a_script(name: str) -> None:
    (outcome,) = world_outcomes(ask_for_help, 1, name, env=PLAIN_PROCESS)
    assert (outcome.error, outcome.message) == ("SystemExit", "0"), outcome.traceback
    assert "usage:" in outcome.output


def ask_for_help(name: str) -> None:
    path = str(EXAMPLES / f"{name}.py")
    sys.argv = [path, "--help"]
    runpy.run_path(path, run_name="__main__")
