"""Writing down one process of a run: the training puts values into a queue, and a thread writes them once a second."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import socket
import sqlite3
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.errors import a_kind_of
from accelerate.runs import store
from accelerate.tracking.base import as_number, flat

logger: logging.Logger = logging.getLogger("accelerate.tracking")

# How often the thread writes; with many ranks the others less often, since only one can write at a time.
INTERVAL = 1.0
RANKS_PER_SECOND = 20
# A sign of life at least so often.
BEAT = 10.0
# Step times and samples of the system become one row in so many seconds: more in a run that takes longer.
SUMMARY = 2.0, 60.0
SHARE_OF_RUN = 1 / 500
# What may wait for a file that cannot be written.
CAPACITY = 200_000
# How long the end of training waits for the last write, and for how long a lock is nothing to speak of.
LAST_WRITE = 10.0
NO_RUN = 2.0
LONG_LOCK = 30.0
# Beyond this nobody reads a name or a text, and a mistake in a loop should not fill the disk.
LONGEST_NAME = 500
LONGEST_TEXT = 4000
MOST_WARNINGS = 200
MOST_TEXTS = 1000
# Steps beyond it cannot be counted on: a float has no number for each.
_LARGEST_STEP = 2.0**53


@dataclass
class Identity:
    """Which run, and which of its processes.

    key: of the run; None as long as only the first rank knows it, which `publish`es it for the others to `find`.
    launch: what all attempts of one launcher have in common. attempt: how many there were before.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    key: str | None = None
    launch: str | None = None
    attempt: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    find: Callable[[], str | None] = lambda: None
    publish: Callable[[str], None] = lambda key: None


class Logged(NamedTuple):
    """One call of `log`. step: None for that of the calls before. ready: waits for copies from a device."""

    time: float
    step: float | None
    values: dict[str, Any]
    ready: Callable[[], Any] | None = None
    kind: str = "metric"
    calls_before: int = 0


class Point(NamedTuple):
    kind: str
    name: str
    number: int
    step: float
    time: float
    value: float | None


class LoggedEvent(NamedTuple):
    """Something that happened once."""

    time: float
    kind: str
    text: str


class Recorder:
    """What one process writes of a run. gauges: takes the samples of the system, by name."""

    def __init__(self, path: Path, who: Identity, gauges: Callable[[], dict[str, float]] = dict) -> None:
        self.path = path
        self.who = who
        self.trouble: str | None = None  # why the last write failed, for the training's thread to say
        self.left_out: str | None = None  # the first value that is not kept, with its kind, for the same thread
        self.state: str | None = None
        self.reason: str | None = None
        self._gauges = gauges
        self._queue: deque[Logged | LoggedEvent] = deque()
        self._pending: list[Point | LoggedEvent] = []
        self._rows: list[tuple[float, int, int, float, float]] = []
        self._config: str | None = None
        self._durations: list[float] = []
        self._last_step: float | None = None
        self._steps = self._logs = self._lost = self._warnings = self._texts = 0
        self._first_log: int | None = 0 if who.attempt == 0 else None  # None: the file knows how far the others came
        self._began = time.time()
        self._number = int(self._began * 1e6)  # so that later attempts go on with greater numbers
        self._process = os.getpid()
        self._identity = (store.process_space(), self._process, store.born(self._process))
        self._seen, self._summed = 0.0, self._began
        self._failing_since: float | None = None
        self._published = False
        self._wake = threading.Event()
        self._change = threading.Condition()
        self._states: set[str | None] = set()  # that are in the file
        self._over = self._gave_up = False
        self._thread = threading.Thread(target=self._run, name="accelerate-runs", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.leave)

    # --- called by the training -----------------------------------------------------------------------------------

    def log(self, values: dict[str, Any], step: Any, ready: Callable[[], Any] | None) -> None:
        """Values of a step; without one, of as many as there were calls before, as with one that is no number."""
        number = None if step is None else float(step)
        if number is not None and not math.isfinite(number):
            number = None
        self._put(Logged(time.time(), number, values, ready, calls_before=self._logs))
        self._logs += 1

    def event(self, kind: str, text: str) -> None:
        self._put(LoggedEvent(time.time(), kind, text))

    def warning(self, text: str) -> None:
        """A warning that was shown: the first ones of a process."""
        self._warnings += 1
        if self._warnings <= MOST_WARNINGS:
            self.event("warning", text)

    def configure(self, values: dict[str, Any]) -> None:
        if self._forked():
            return
        self._config = json.dumps(plain(values))
        self._wake.set()

    def step(self) -> None:
        """An optimizer step is over: its time is that since the one before."""
        if self._over:
            return
        now = time.perf_counter()
        if self._last_step is not None:
            self._durations.append(now - self._last_step)
        self._last_step = now

    def end(self, state: str, reason: str | None = None) -> bool:
        """The final state; False when it could not be written in time."""
        if self.state == "died" or self.reason is not None or self._forked():
            return True
        self.state, self.reason = state, reason
        if not self._thread.is_alive():  # it died of what was on its way when training ended
            self._try_to_write()
            return state in self._states
        self._wake.set()
        # Who has not heard which run it belongs to by now never will, if the first rank has not started one.
        limit = LAST_WRITE if self.who.rank == 0 or self.who.key is not None else NO_RUN
        with self._change:
            self._change.wait_for(lambda: state in self._states or self._gave_up, timeout=limit)
            return state in self._states

    def close(self) -> None:
        """Nothing comes any more."""
        if self._forked():
            return
        atexit.unregister(self.leave)
        self._over = True
        self._wake.set()
        self._thread.join(LAST_WRITE)

    def leave(self) -> None:
        """The program ends without a word."""
        if self.state is None:
            self.end("ended")
        self.close()

    def _put(self, record: Logged | LoggedEvent) -> None:
        if self._forked():
            return
        if len(self._queue) < CAPACITY:
            self._queue.append(record)
        else:
            self._lost += 1

    def _forked(self) -> bool:
        """Whether this is a fork of the process: there is no thread that writes, and locks may be held by nobody."""
        return self._process != os.getpid()

    # --- the thread -----------------------------------------------------------------------------------------------

    @property
    def _interval(self) -> float:
        return INTERVAL if self.who.rank == 0 else max(INTERVAL, self.who.world_size / RANKS_PER_SECOND)

    def _run(self) -> None:
        while True:
            over = self._over  # what came before it was set is written now
            self._try_to_write()
            if over:
                return
            hurry = self.state is not None and self.state not in self._states
            self._wake.wait(0.1 if hurry else self._interval)
            self._wake.clear()

    def _try_to_write(self) -> None:
        try:
            self._write()
            self.trouble = self._failing_since = None
        except Exception as error:  # whatever it is, the training and the next writes go on
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            locked = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
            if not locked or now - self._failing_since > LONG_LOCK or self._over:
                text = str(error) if isinstance(error, ValueError) else f"{self.path} cannot be written: {error}"
                self.trouble = text
            if not locked and self.state is not None:  # no wait would help
                with self._change:
                    self._gave_up = True
                    self._change.notify_all()
            logger.debug("A write of run %s failed.", self.who.key, exc_info=True)

    def _write(self) -> None:
        if self.who.rank != 0 and self.who.key is None:
            self.who.key = self.who.find()
            if self.who.key is None:
                return
        if self._first_log is None and not self._go_on():
            return
        now = time.time()
        self._collect(now)
        beat = max(BEAT, 2 * self._interval)
        state, config = self.state, self._config
        if not (self._pending or self._rows or config or state not in self._states or now - self._seen >= beat):
            return
        with store.writing(self.path) as connection:
            run = self._run_row(connection)
            if run is None:
                return  # the first rank has not made it yet
            self._process_row(connection, run, now, beat)
            if config is not None:
                connection.execute("UPDATE runs SET config = ? WHERE id = ?", (config, run))
            self._write_pending(connection, run)
        self._pending.clear()
        self._rows.clear()
        self._seen = now
        if config is self._config:
            self._config = None
        if not self._published:
            assert self.who.key is not None
            self.who.publish(self.who.key)
            self._published = True
        with self._change:
            self._states.add(state)
            self._change.notify_all()

    def _go_on(self) -> bool:
        """Count from where the earlier attempts of this run came to; False as long as there is no run."""
        with store.writing(self.path) as connection:
            run = self._run_row(connection)
            if run is None:
                return False
            where = (run, self.who.rank)
            times = "SELECT ifnull(max(step), 0) FROM step_times WHERE run = ? AND rank = ?"
            self._steps = int(connection.execute(times, where).fetchone()[0])
            logged = (
                "SELECT ifnull(max(step) + 1, 0) FROM points JOIN series ON series = id"
                " WHERE run = ? AND rank = ? AND kind = 'metric' AND step < ?"
            )
            self._first_log = int(connection.execute(logged, (*where, _LARGEST_STEP)).fetchone()[0])
        return True

    def _collect(self, now: float) -> None:
        """Take what waits, and what is due of step times and samples."""
        while self._queue and len(self._pending) < CAPACITY:
            record = self._queue.popleft()
            self._pending += [record] if isinstance(record, LoggedEvent) else self._points(record)
        if self._lost:
            lost, self._lost = self._lost, 0
            text = f"{lost} calls of `log` were dropped: the file could not be written as fast as they came."
            self._pending.append(LoggedEvent(now, "warning", text))
        least, most = SUMMARY
        due = min(max(least, (now - self._began) * SHARE_OF_RUN), most)
        if now - self._summed < due and self.state is None:
            return
        self._summed = now
        durations, self._durations = self._durations, []
        if durations:
            self._steps += len(durations)
            self._rows.append((now, self._steps, len(durations), statistics.median(durations), max(durations)))
        self._pending += self._points(Logged(now, self._steps, self._gauges(), kind="system"))

    def _points(self, record: Logged) -> Iterator[Point | LoggedEvent]:
        try:
            if record.ready is not None:
                record.ready()
        except Exception:  # of the device: the training hears of it where it matters
            return
        step = (self._first_log or 0) + record.calls_before if record.step is None else record.step
        for name, value in flat(record.values, "/"):
            if isinstance(value, str):
                self._texts += 1
                if self._texts <= MOST_TEXTS:
                    yield LoggedEvent(record.time, "text", f"{name}: {value}")
                elif self._texts == MOST_TEXTS + 1:
                    yield LoggedEvent(record.time, "warning", f"Only the first {MOST_TEXTS} logged texts are kept.")
                continue
            number = as_number(value)
            if number is not None:
                self._number += 1
                yield Point(record.kind, name, self._number, step, record.time, _stored(number))
            elif value is not None and self.left_out is None:
                self.left_out = f"{name!r}, {a_kind_of(value)}"

    def _run_row(self, connection: sqlite3.Connection) -> int | None:
        """The run in the file. The first rank makes its row, or goes on with that of an earlier attempt."""
        who = self.who
        if who.key is None:
            rows = connection.execute("SELECT key FROM runs WHERE launch = ? ORDER BY id DESC", (who.launch,))
            found = rows.fetchone()
            who.key = os.urandom(16).hex() if found is None else str(found[0])
        found = connection.execute("SELECT id FROM runs WHERE key = ?", (who.key,)).fetchone()
        if found is not None:
            return int(found[0])
        if who.rank != 0:
            return None
        return connection.execute(
            "INSERT INTO runs (key, launch, name, created, facts, config) VALUES (?, ?, ?, ?, ?, '{}')",
            (who.key, who.launch, clean(who.name, LONGEST_NAME), self._began, json.dumps(plain(who.facts))),
        ).lastrowid

    def _process_row(self, connection: sqlite3.Connection, run: int, now: float, beat: float) -> None:
        reason = None if self.reason is None else clean(self.reason, LONGEST_TEXT)
        who = (run, self.who.attempt, self.who.rank, socket.gethostname(), *self._identity)
        connection.execute(
            "INSERT INTO processes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run, attempt, rank)"
            " DO UPDATE SET seen = excluded.seen, state = excluded.state, reason = excluded.reason",
            (*who, self._began, now, beat, self.state, reason),
        )

    def _write_pending(self, connection: sqlite3.Connection, run: int) -> None:
        rank = self.who.rank
        series: dict[tuple[str, str], int] = {}
        for point in self._pending:
            if isinstance(point, Point) and (point.kind, point.name) not in series:
                key = (run, point.kind, rank, clean(point.name, LONGEST_NAME))
                connection.execute("INSERT OR IGNORE INTO series (run, kind, rank, name) VALUES (?, ?, ?, ?)", key)
                rows = connection.execute(
                    "SELECT id FROM series WHERE run = ? AND kind = ? AND rank = ? AND name = ?", key
                )
                series[point.kind, point.name] = int(rows.fetchone()[0])
        # A row that the tables do not take is left out: nothing that was logged keeps the rest from the file.
        connection.executemany(
            "INSERT OR IGNORE INTO points VALUES (?, ?, ?, ?, ?)",
            (
                (series[point.kind, point.name], point.number, point.step, point.time, point.value)
                for point in self._pending
                if isinstance(point, Point)
            ),
        )
        connection.executemany(
            "INSERT OR IGNORE INTO events (run, rank, time, kind, text) VALUES (?, ?, ?, ?, ?)",
            (
                (run, rank, event.time, event.kind, clean(event.text, LONGEST_TEXT))
                for event in self._pending
                if isinstance(event, LoggedEvent)
            ),
        )
        connection.executemany(
            "INSERT OR REPLACE INTO step_times VALUES (?, ?, ?, ?, ?, ?, ?)", ((run, rank, *row) for row in self._rows)
        )


def clean(text: str, longest: int) -> str:
    """Text as a file can hold it: no halves of characters, and not without an end."""
    return text[:longest].encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _stored(number: float) -> float | None:
    try:
        number = float(number)
    except OverflowError:
        number = math.inf if number > 0 else -math.inf
    return None if math.isnan(number) else number


def plain(value: Any) -> Any:
    """A value of a config as JSON has it; what JSON has not becomes text."""
    if isinstance(value, Mapping):
        return {clean(str(key), LONGEST_NAME): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return clean(str(value), LONGEST_TEXT)
