"""Runs as a training would write them, without one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate.runs import store
from accelerate.runs.read import Project, RecordedRun
from accelerate.tracking import recorder as recording
from accelerate.tracking.recorder import Identity, Recorder

# A machine that is busy with other tests may take longer to write than a training would wait.
recording.LAST_WRITE = recording.NO_RUN = 120.0

HOSTILE = '</script><img src=x onerror="document.title=1"> [red]\x1b[2J"\'{}\n'


def write(
    folder: Path,
    name: str = "run",
    logs: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    state: str = "ended",
    reason: str | None = None,
    events: list[tuple[str, str]] | None = None,
    steps: int = 0,
) -> Path:
    """A whole run of one process."""
    recorder = Recorder(
        store.place(folder), Identity(name, key=os.urandom(16).hex(), facts={"command": "train.py", "torch": "2"})
    )
    recorder.configure(config or {})
    for step, values in enumerate(logs or []):
        recorder.log(values, step, None)
    for kind, text in events or []:
        recorder.event(kind, text)
    for _ in range(steps):
        recorder.step()
    recorder.start()
    assert recorder.end(state, reason)
    recorder.close()
    assert recorder.trouble is None
    return recorder.path


def runs_of(path: Path) -> list[RecordedRun]:
    return Project(path).runs()


def values(project: Project, run: RecordedRun, name: str) -> list[tuple[float, float | None]]:
    """Step and value of every point of a metric."""
    [summary] = [each for each in run.summaries if each.name == name and each.kind == "metric"]
    return [(step, None if isinstance(value, str) else value) for step, _, value, _ in project.points(summary.series)]
