"""Runs in a terminal: a list, and a comparison of some of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from accelerate.runs.curves import Curves, bucketed
from accelerate.runs.read import Project, RecordedRun, Summary, differences, direction

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"running": "cyan", "ended": "green", "died": "bold red"}
_NUMBERS = ("run", "duration", "last step", "best", "last")
_WIDE = 110
_ARROWS = {1: " ↑", -1: " ↓", 0: ""}


def sparkline(values: list[float | None]) -> str:
    """A curve in one line of text."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else _BARS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """A time span for people: `3 m 20 s`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} m {seconds % 60:.0f} s"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} m"
    return f"{seconds // 86400:.0f} d {seconds % 86400 // 3600:.0f} h"


def number(value: float | None) -> str:
    """A value for people; what is not a number says so."""
    return "nan" if value is None else f"{value:.4g}"


def shown(text: str) -> Text:
    """Text as it is: neither the terminal nor rich takes anything in it for an order."""
    from rich.text import Text

    return Text("".join(letter if letter.isprintable() else "\ufffd" for letter in text))


def list_of(project: Project, runs: list[RecordedRun], metric: str | None, width: int) -> Table:
    """A line for each run, with one of its metrics. width: of the terminal, in which less is shown if it is narrow."""
    wide = width >= _WIDE
    columns = ("run", "name", "state", "started", "duration", "last step", "metric", "curve", "best", "last")
    table = _table(*(column for column in columns if wide or column not in ("started", "last step")))
    for column in table.columns:
        column.no_wrap = column.header not in ("name", "metric")  # which may be long
    curves = Curves(project)
    for run in runs:
        chosen = main_metric(run.metrics, metric)
        about: list[Any] = ["", "", "", ""]
        step = ""
        if chosen is not None:
            best = "" if chosen.best is None else number(chosen.best[0]) + _ARROWS[direction(chosen.name)]
            step = f"{chosen.last_step:.0f}"
            about = [shown(chosen.name), _line_of(curves, chosen, 20 if wide else 8), best, number(chosen.last)]
        state = shown(run.state)
        state.stylize(_STYLES[run.state])
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
        more = ([started], [step]) if wide else ([], [])
        name = shown(run.name if run.resumed is None else f"{run.name} (from {run.resumed})")
        table.add_row(str(run.number), name, state, *more[0], duration(run.seconds), *more[1], *about)
    return table


def reasons(runs: list[RecordedRun]) -> list[Text]:
    """One line for each run with which something is wrong."""
    lines = []
    for run in runs:
        if run.reason is not None:
            line = shown(f"run {run.number} {run.state}: {run.reason}")
            line.stylize("red" if run.state == "died" else "yellow")
            lines.append(line)
    return lines


def comparison(project: Project, runs: list[RecordedRun]) -> list[Table | Text]:
    """The metrics of some runs side by side, and the settings that differ; of one run, all it has."""
    curves = Curves(project)
    names = dict.fromkeys(each.name for run in runs for each in run.metrics)
    metrics = _table("metric", *(shown(f"{run.number} {run.name}") for run in runs))
    for name in names:
        cells: list[Any] = [shown(name + _ARROWS[direction(name)])]
        for run in runs:
            found = next((each for each in run.metrics if each.name == name), None)
            cells.append("" if found is None else _cell(curves, found))
        metrics.add_row(*cells)
    different, common = differences(runs)
    settings = _table("setting", *(str(run.number) for run in runs))
    for name, values in different.items():
        settings.add_row(shown(name), *("" if value is None else shown(value) for value in values))
    parts: list[Table | Text] = [metrics] if names else []
    if len(runs) == 1:
        for name, value in common.items():
            settings.add_row(shown(name), shown(value))
    if settings.row_count:
        parts.append(settings)
    if len(runs) > 1 and common:
        parts.append(shown(f"the same in all runs: {', '.join(common)}"))
    return parts


def main_metric(metrics: list[Summary], asked: str | None) -> Summary | None:
    """The metric that a list shows: the one that was asked for, else the first loss, else the first of all."""
    if asked is not None:
        return next((each for each in metrics if each.name == asked), None)
    losses = [each for each in metrics if "loss" in each.name.lower()]
    return next(iter([*losses, *metrics]), None)


def _line_of(curves: Curves, summary: Summary, width: int) -> str:
    points = curves.of(summary.series)
    return sparkline(bucketed(points[:, 0], points[:, 2], None, None, width)["y"])


def _cell(curves: Curves, summary: Summary) -> str:
    best = f", best {number(summary.best[0])} at {summary.best[1]:.0f}" if summary.best is not None else ""
    return f"{_line_of(curves, summary, 12)} {number(summary.last)}{best}"


def _table(*columns: Any) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    return table
