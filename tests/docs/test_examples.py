"""The examples do what they say, on one process and on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.runner import PLAIN_PROCESS
from tests.harness import run_world

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def call(name: str, function: str, *args: Any) -> Any:
    """On a rank: a function of an example."""
    import runpy

    return runpy.run_path(str(EXAMPLES / f"{name}.py"))[function](*args)


def on(processes: int, *args: Any) -> list[Any]:
    env = PLAIN_PROCESS if processes == 1 else None
    results: list[Any] = run_world(call, processes, *args, env=env)
    return results


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


@pytest.mark.parametrize("name", ["evaluation", "gradient_accumulation"])
def test_as_a_script(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--help"]
    assert "usage:" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
