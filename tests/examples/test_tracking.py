"""The tracking example writes what it says, on one process and on two."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest

from accelerate.runs.read import Project, find
from tests.docs.runner import PLAIN_PROCESS
from tests.examples.running import EXAMPLES
from tests.harness import run_world
from tests.unit.runs.toys import values

EXAMPLE = EXAMPLES / "tracking.py"


def on_rank(folder: str) -> tuple[dict[str, float], str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        milliseconds = runpy.run_path(str(EXAMPLE))["train"](2, folder)
    return milliseconds, output.getvalue()


@pytest.mark.parametrize("processes", [1, 2])
def test_what_it_shows(processes: int, tmp_path: Path) -> None:
    env = PLAIN_PROCESS if processes == 1 else None
    results = run_world(on_rank, processes, str(tmp_path), env=env)
    steps = 2 * (57 // processes + (processes == 2))
    assert f"mean of {steps - 1} steps" in results[0][1]
    assert [output for _, output in results[1:]] == [""] * (processes - 1)
    assert len({str(milliseconds) for milliseconds, _ in results}) == 1
    project = Project(find(str(tmp_path)))
    [run] = project.runs()
    assert (run.name, run.state, run.config["processes"]) == ("digits", "ended", processes)
    losses = values(project, run, "loss")
    assert [step for step, _ in losses] == list(range(steps))
    first, last = losses[0][1], losses[-1][1]
    assert first is not None and last is not None and last < first / 2
    forward = values(project, run, "step_time/forward_ms")[0][1]
    assert forward is not None and forward > 0
