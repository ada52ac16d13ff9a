"""What the page of runs shows: its files, and the data behind them, for a browser that asks or for one file to send."""

from __future__ import annotations

import dataclasses
import json
import time
from importlib import resources
from typing import Any

from accelerate.runs.curves import Curves, bucketed
from accelerate.runs.read import Project, RecordedEvent, RecordedRun, flat

# The files of the page, and what each is.
FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "script.js": "text/javascript; charset=utf-8",
}
# As many points as a chart can show, and as many of the latest texts and warnings.
MOST_POINTS = 1000
MOST_EVENTS = 300
# Seconds for which the charts of a page are asked for by the same overview.
RECENT = 1.0
# What a file that is sent to others says nothing of.
PRIVATE_FACTS = ("command", "folder", "host")


def file(name: str) -> str:
    """One of `FILES`."""
    return resources.files("accelerate.runs").joinpath("web").joinpath(name).read_text(encoding="utf-8")


class Page:
    """Answers what the page asks of one project. runs: only these, where they are given."""

    def __init__(self, project: Project, runs: list[int] | None = None) -> None:
        self._project = project
        self._chosen = runs
        self._curves = Curves(project)
        self._recent: tuple[float, dict[str, Any]] | None = None

    def overview(self) -> dict[str, Any]:
        """All runs, without their curves."""
        runs = self._project.runs()
        if self._chosen is not None:
            runs = [run for run in runs if run.number in self._chosen]
        found = {"project": str(self._project.path), "time": time.time(), "runs": [_as_json(run) for run in runs]}
        self._recent = time.monotonic(), found
        return found

    def recent_overview(self) -> dict[str, Any]:
        """The last one, unless it is old."""
        if self._recent is not None and time.monotonic() - self._recent[0] < RECENT:
            return self._recent[1]
        return self.overview()

    def curves(
        self,
        overview: dict[str, Any],
        kind: str,
        name: str,
        axis: str,
        numbers: list[int],
        low: float | None = None,
        high: float | None = None,
        most: int = MOST_POINTS,
    ) -> list[dict[str, Any]]:
        """One curve for each run, and each rank of it, that has something of this kind and name.

        axis: "step", or "time" for the seconds since its run began. low, high: only what lies between them.
        """
        import numpy as np

        found = []
        for run in overview["runs"]:
            if run["number"] not in numbers:
                continue
            each: dict[int, Any]
            if kind == "steps":
                each = {rank: np.array(_times(rows)) for rank, rows in self._project.step_times(run["number"]).items()}
            else:
                chosen = [series for series in run["series"] if (series["kind"], series["name"]) == (kind, name)]
                each = {series["rank"]: self._curves.of(series["id"]) for series in chosen}
            for rank, points in each.items():
                x = points[:, 0] if axis == "step" else points[:, 1] - run["created"]
                found.append({"run": run["number"], "rank": rank, **bucketed(x, points[:, 2], low, high, most)})
        return found


def _times(rows: list[tuple[float, int, int, float, float]]) -> list[tuple[float, float, float]]:
    return [(step, moment, median * 1000) for moment, step, _, median, _ in rows]


# What the page shows of a run without any change.
_SHOWN_AS_IS = ("number", "name", "state", "reason", "created", "until", "seconds", "resumed", "facts")


def _as_json(run: RecordedRun) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in _SHOWN_AS_IS},
        "config": flat(run.config),
        "processes": [dataclasses.asdict(process) for process in run.processes],
        "events": [dataclasses.asdict(event) for event in _shown(run.events)],
        "series": [
            {
                "id": each.series,
                "kind": each.kind,
                "rank": each.rank,
                "name": each.name,
                "count": each.count,
                "last": _finite(each.last),
                "step": _finite(each.last_step),
                "best": None if each.best is None else [_finite(number) for number in each.best],
            }
            for each in run.summaries
        ],
    }


def _shown(events: list[RecordedEvent]) -> list[RecordedEvent]:
    """All checkpoints, and the latest of the rest."""
    rest = [event for event in events if event.kind not in ("saved", "loaded")]
    left_out = set(map(id, rest[:-MOST_EVENTS]))
    return [event for event in events if id(event) not in left_out]


def to_json(data: Any, **options: Any) -> str:
    """Text that any reader of JSON takes: Python alone writes numbers that are none."""
    return json.dumps(data, allow_nan=False, **options)


def _finite(number: float | None) -> float | str | None:
    """A number as JSON has it: those that it has not become text."""
    return number if number is None or abs(number) < float("inf") else str(number)


def _for_others(run: dict[str, Any]) -> dict[str, Any]:
    processes = [{name: value for name, value in each.items() if name != "host"} for each in run["processes"]]
    facts = {name: fact for name, fact in run["facts"].items() if name not in PRIVATE_FACTS}
    return {**run, "facts": facts, "processes": processes}


def one_file(page: Page) -> str:
    """The page with all its data, which needs nothing else."""
    overview = page.overview()
    overview = {**overview, "runs": [_for_others(run) for run in overview["runs"]]}
    numbers = [run["number"] for run in overview["runs"]]
    kinds = {(series["kind"], series["name"]): None for run in overview["runs"] for series in run["series"]}
    data = {
        "overview": overview,
        "curves": [
            {"kind": kind, "name": name, "axis": axis, "curves": page.curves(overview, kind, name, axis, numbers)}
            for kind, name in [*kinds, ("steps", "")]
            for axis in (("time",) if kind == "system" else ("step", "time"))
        ],
    }
    # Inside of a script only the end of a script means something to a browser, and that begins with this sign.
    text = to_json(data, separators=(",", ":")).replace("<", "\\u003c")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    parts = {
        '<link rel="stylesheet" href="style.css">': f"<style>\n{file('style.css')}</style>",
        "<!-- policy -->": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<script src="script.js"></script>': f'<script type="application/json" id="data">{text}</script>\n'
        f"<script>\n{file('script.js')}</script>",
    }
    html = file("index.html")
    for place, content in parts.items():
        html = html.replace(place, content, 1)
    return html
