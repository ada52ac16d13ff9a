"""Reading the runs of a project: what they were, how far they came, and whether they still go on."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate.runs import store

# A process on another machine that was silent for so many beats is gone.
_SILENT_BEATS = 6
# Two readings of when a process began may differ by so many seconds.
_SAME_BIRTH = 2.0


@dataclass(frozen=True)
class Process:
    """One process of a run. state: "running", "ended", "died", or "gone" when nobody knows why."""

    attempt: int
    rank: int
    host: str
    started: float
    seen: float
    state: str
    reason: str | None


@dataclass(frozen=True)
class RecordedEvent:
    rank: int
    time: float
    kind: str
    text: str


@dataclass(frozen=True)
class Summary:
    """What is known of a curve without its points. least and most: value and step; None if all are not a number."""

    series: int
    kind: str
    rank: int
    name: str
    count: int = 0
    number: int = -1
    last: float | None = None
    last_step: float = 0.0
    least: tuple[float, float] | None = None
    most: tuple[float, float] | None = None

    @property
    def best(self) -> tuple[float, float] | None:
        """The value and step that a person would call the best, where the name tells which end that is."""
        return {1: self.most, -1: self.least, 0: None}[direction(self.name)]


@dataclass(frozen=True)
class RecordedRun:
    """A run as it is in the file. resumed: the number of the run whose checkpoint it has loaded."""

    number: int
    name: str
    created: float
    facts: dict[str, Any]
    config: dict[str, Any]
    processes: list[Process]
    events: list[RecordedEvent]
    resumed: int | None = None
    summaries: list[Summary] = field(default_factory=list)

    @cached_property
    def latest(self) -> list[Process]:
        """The processes of the last attempt."""
        last = max((process.attempt for process in self.processes), default=0)
        return [process for process in self.processes if process.attempt == last]

    @cached_property
    def state(self) -> str:
        """ "running", "ended" or "died"."""
        states = {process.state for process in self.latest}
        if "died" in states:
            return "died"
        if any(process.rank == 0 and process.state == "ended" for process in self.latest):
            return "ended"
        return "running" if "running" in states else "died"

    @cached_property
    def reason(self) -> str | None:
        """Why it died or ended early, or what is wrong with it."""
        several = len(self.latest) > 1
        failed = sorted((each for each in self.latest if each.state == "died"), key=lambda each: each.seen)
        if failed:
            where = f"rank {failed[0].rank}: " if several else ""
            return f"{where}{failed[0].reason or 'it gave no reason'}"
        gone = [each for each in self.latest if each.state == "gone"]
        if self.state == "ended":
            return next((each.reason for each in self.latest if each.reason is not None), None)
        if not gone:
            return None
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(each.seen for each in gone)))
        if self.state == "died":
            return f"killed or lost since {since}"
        ranks = ", ".join(str(each.rank) for each in gone)
        return f"rank {ranks} killed or lost since {since}"

    @cached_property
    def until(self) -> float:
        """When it was last heard of."""
        return max((process.seen for process in self.processes), default=self.created)

    @property
    def seconds(self) -> float:
        """How long it has taken, with the time between attempts."""
        return max((time.time() if self.state == "running" else self.until) - self.created, 0.0)

    @property
    def metrics(self) -> list[Summary]:
        return [each for each in self.summaries if each.kind == "metric"]


# Words in the names of metrics, by whether more is better.
_MORE = ("acc", "f1", "auc", "bleu", "rouge", "reward", "score", "recall", "precision", "iou", "map", "throughput")
_LESS = ("loss", "err", "perplexity", "ppl", "mse", "mae", "rmse", "wer", "cer", "nll", "fid", "bpc", "bpb")


def direction(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where nobody can tell."""
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower()).split()
    if any(word.startswith(_LESS) for word in words):
        return -1
    return 1 if any(word.startswith(_MORE) for word in words) else 0


class Project:
    """The file of a project's runs. It may grow while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._summaries: dict[int, Summary] = {}

    def runs(self) -> list[RecordedRun]:
        """All runs, the oldest first."""
        with store.reading(self.path) as connection:
            here = store.process_space()
            rows = connection.execute("SELECT id, name, created, facts, config FROM runs ORDER BY id").fetchall()
            processes: dict[int, list[Process]] = {}
            for run, *row in connection.execute("SELECT * FROM processes ORDER BY run, attempt, rank"):
                processes.setdefault(run, []).append(_process(here, *row))
            events: dict[int, list[RecordedEvent]] = {}
            for run, *row in connection.execute("SELECT run, rank, time, kind, text FROM events ORDER BY time, id"):
                events.setdefault(run, []).append(RecordedEvent(*row))
            summaries: dict[int, list[Summary]] = {}
            series = connection.execute("SELECT run, id, kind, rank, name FROM series ORDER BY id").fetchall()
            for run, *row in series:
                summaries.setdefault(run, []).append(self._summary(connection, Summary(*row)))
        resumed = _resumed(events)
        return [
            RecordedRun(
                run,
                name,
                created,
                json.loads(facts),
                _config(config),
                processes.get(run, []),
                events.get(run, []),
                resumed.get(run),
                summaries.get(run, []),
            )
            for run, name, created, facts, config in rows
        ]

    def step_times(self, run: int) -> dict[int, list[tuple[float, int, int, float, float]]]:
        """By rank: time, steps so far, how many of them this is about, their median and longest seconds."""
        found: dict[int, list[tuple[float, int, int, float, float]]] = {}
        with store.reading(self.path) as connection:
            query = "SELECT rank, time, step, count, median, longest FROM step_times WHERE run = ? ORDER BY rank, time"
            for rank, *row in connection.execute(query, (run,)):
                found.setdefault(rank, []).append(tuple(row))
        return found

    def points(self, series: int, after: int = -1) -> Iterator[tuple[float, float, float | str, int]]:
        """Step, time, value ("nan" if it is not a number) and number of the points of a series."""
        with store.reading(self.path) as connection:
            yield from connection.execute(
                "SELECT step, time, ifnull(value, 'nan'), number FROM points WHERE series = ? AND number > ?"
                " ORDER BY number",
                (series, after),
            )

    def _summary(self, connection: sqlite3.Connection, empty: Summary) -> Summary:
        """Of a series as it is now, from what is new in it."""
        known = self._summaries.get(empty.series, empty)
        new = "FROM points WHERE series = ? AND number > ?"
        where = (known.series, known.number)
        last = connection.execute(f"SELECT number, step, value {new} ORDER BY number DESC LIMIT 1", where).fetchone()
        if last is None:
            return known
        # SQLite takes the other columns from the row that has the least or the most.
        least = connection.execute(f"SELECT min(value), step, count(*) {new}", where).fetchone()
        most = connection.execute(f"SELECT max(value), step {new}", where).fetchone()
        found = Summary(
            *(known.series, known.kind, known.rank, known.name),
            count=known.count + least[2],
            number=last[0],
            last=last[2],
            last_step=last[1],
            least=_chosen(min, known.least, least[:2]),
            most=_chosen(max, known.most, most),
        )
        self._summaries[empty.series] = found
        return found


def _config(text: str) -> dict[str, Any]:
    """The settings of a run. What is no mapping was written by mistake, and keeps no other run from being read."""
    found = json.loads(text)
    return found if isinstance(found, dict) else {"config": found}


def _chosen(choose: Any, old: tuple[float, float] | None, new: Any) -> tuple[float, float] | None:
    known = [pair for pair in (old, new) if pair is not None and pair[0] is not None]
    return choose(known, key=lambda pair: pair[0]) if known else None


def _process(
    here: str,
    attempt: int,
    rank: int,
    host: str,
    space: str,
    pid: int,
    born: float | None,
    started: float,
    seen: float,
    beat: float,
    state: str | None,
    reason: str | None,
) -> Process:
    if state is None:
        if space == here:
            now = store.born(pid)
            alive = now is not None and (born is None or abs(now - born) < _SAME_BIRTH)
        else:
            alive = time.time() - seen < _SILENT_BEATS * beat
        state = "running" if alive else "gone"
    return Process(attempt, rank, host, started, seen, state, reason)


def _resumed(events: dict[int, list[RecordedEvent]]) -> dict[int, int]:
    """By run, the one that has saved what it has loaded."""
    saves: dict[str, list[tuple[float, int]]] = {}
    for run, list_of in events.items():
        for event in list_of:
            if event.kind == "saved":
                saves.setdefault(event.text, []).append((event.time, run))
    found: dict[int, int] = {}
    for run, list_of in events.items():
        loaded = next((event for event in list_of if event.kind == "loaded"), None)
        if loaded is None:
            continue
        others = [save for save in saves.get(loaded.text, []) if save[1] != run and save[0] <= loaded.time]
        if others:
            found[run] = max(others)[1]
    return found


def find(place: str | None) -> Path:
    """The file of runs that a person means: a file, that of a folder, or the only one in the folders below it."""
    start = Path(place or ".").expanduser()
    if start.is_file():
        return start
    if not start.is_dir():
        raise FileNotFoundError(f"There is no folder {start}: give the `project_dir`, or its {store.FILE_NAME}.")
    if (start / store.FILE_NAME).is_file():
        return start / store.FILE_NAME
    below = sorted({*start.glob(f"*/{store.FILE_NAME}"), *start.glob(f"*/*/{store.FILE_NAME}")})
    if not below:
        raise FileNotFoundError(
            f"There are no runs in {start.resolve()}, nor in the folders below it: train with `log_with='local'`, or "
            "give the folder of `project_dir`."
        )
    if len(below) > 1:
        raise ValueError(
            f"There are runs in several folders, so name one of them: {', '.join(str(f.parent) for f in below)}."
        )
    return below[0]


def flat(config: dict[str, Any], before: str = "") -> dict[str, str]:
    """A nested config as text by dotted name."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def differences(runs: list[RecordedRun]) -> tuple[dict[str, list[str | None]], dict[str, str]]:
    """The settings that differ, for each run (None where it has none), and those that all have in common."""
    configs = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = {name: [config.get(name) for config in configs] for name in names}
    common = {name: row[0] for name, row in rows.items() if len(set(row)) == 1 and row[0] is not None}
    return {name: row for name, row in rows.items() if name not in common}, common
