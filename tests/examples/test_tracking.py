"""The tracking example writes what it says, on one process and on two."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.docs.runner import PLAIN_PROCESS
from tests.examples.running import EXAMPLES
from tests.harness import run_world

EXAMPLE = EXAMPLES / "tracking.py"


def on_rank(folder: str) -> tuple[dict[str, float], str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        milliseconds = runpy.run_path(str(EXAMPLE))["train"](2, folder)
    return milliseconds, output.getvalue()


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_what_it_shows(processes: int, tmp_path: Path) -> None:
    env = PLAIN_PROCESS if processes == 1 else None
    results = run_world(on_rank, processes, str(tmp_path), env=env)
    steps = 2 * (57 // processes + (processes == 2))
    assert f"mean of {steps - 1} steps" in results[0][1]
    assert [output for _, output in results[1:]] == [""] * (processes - 1)
    assert len({str(milliseconds) for milliseconds, _ in results}) == 1
    found = events(tmp_path / "digits")
    assert [event.step for event in found.Scalars("loss")] == list(range(steps))
    assert found.Scalars("loss")[-1].value < found.Scalars("loss")[0].value / 2
    assert found.Scalars("step_time/forward_ms")[0].value > 0
    assert found.Tags()["images"] == ["first digits"]
