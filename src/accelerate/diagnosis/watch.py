"""A thread in each rank that looks, once a second, whether it gets on; when one has waited too long, all are shown.

The training does nothing for it: the thread reads its stack, and how many collectives torch has counted. A rank that
has begun no collective for some seconds notes in the store where it is. One that has waited in a collective for the
limit reads the notes of all and shows them, on the screen and with their stacks in a file; again after twice the
time, and so on. Nobody is ended, unless that was asked for.

All notes go to one process, that with the store. So the more ranks there are, the more seldom each of them notes
something; and where that is more seldom than twice in the limit, the limit is longer.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate.diagnosis import limits, place, roll
from accelerate.diagnosis.roll import Note, Notes
from accelerate.environments import World
from accelerate.torch_internals.process_groups import collectives_begun, own_connection

_LOOK = 1.0
_NOTE_AFTER = 5.0
# Of all ranks together.
_NOTES_PER_SECOND = 100
# Of a question to the store.
PATIENCE = timedelta(seconds=5)
# A program that ends within so many seconds after Control-C ends because of it.
_ENDS_WITHIN = 10.0


class HangWatch:
    """The watch of this rank."""

    def __init__(self, notes: Notes, rank: int, limit: float, abort: bool, device_works: Callable[[], bool]) -> None:
        self._notes = notes
        self._rank = rank
        self._pause = notes.size / _NOTES_PER_SECOND  # between two notes of this rank
        self._limit = max(limit, 2 * self._pause)
        # Without a collective until the first note: not the same on all ranks, or all would write at once.
        self._quiet = max(min(_NOTE_AFTER, limit / 2), self._pause * (1 + rank / notes.size) / 2)
        self._abort = abort
        self._device_works = device_works
        self._host = socket.gethostname()
        self._watched = threading.get_ident()
        self._process = os.getpid()
        self._over = False
        self._end = Note("ended", host=self._host)
        self._pipe = _Pipe()
        self._written: Note | None = None
        self._written_at = -self._pause
        self._outdated = False  # what is written: the rank went on
        self._asked_at = -self._pause  # whether to end
        self._file: Path | None = None
        self._failure: Note | None = None
        # What the looks have seen: the collectives, when the last one began, where the rank is since when, rolls shown.
        self._begun, self._shown = -1, 0
        self._moved = self._came = time.monotonic()
        self._seen: place.Signature = ()
        self._thread = threading.Thread(target=self._run, name="accelerate-watch", daemon=True)

    def start(self) -> None:
        """Look again and again, in a thread."""
        self._thread.start()

    def stop(self, note: Note | None = None) -> None:
        """No more looks: the rank leaves its group, or the program ends. note: what others can read from now on."""
        if os.getpid() == self._process and not self._over:
            self._over = True
            self._pipe.end()
            self._thread.join(PATIENCE.total_seconds())
            if self._thread.is_alive():
                return
            self._pipe.close()
            if not self._ends():
                self._write(note or Note("left", host=self._host), time.monotonic())

    def exits(self, code: object, trace: TracebackType | None = None) -> None:
        """The program ends with this code, as given to `sys.exit`. Python tells it only to who runs the program."""
        number = code if isinstance(code, int) else 0 if code is None else 1
        self._end = Note("ended", line=place.at_line(trace).strip(" ()"), text=str(int(number)), host=self._host)

    def failed(self, error: BaseException, trace: TracebackType | None) -> None:
        """The rank ends with an error: what others are told of it."""
        line = place.at_line(trace).strip(" ()")
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        self._failure = Note("failed", line=line, since=time.time(), text=text, host=self._host)

    def everybody(self) -> list[Note]:
        """What each rank says of itself; nothing where the store is gone."""
        try:
            return self._notes.read()
        except (RuntimeError, OSError, ValueError):
            return []

    def leave(self) -> None:
        """The program ends: those who wait for this rank can read so."""
        self.stop(self._failure or self._end)

    def _run(self) -> None:
        while (signals := self._pipe.wait(min(_LOOK, self._limit / 4))) is not None:
            if signal.SIGINT in signals:
                self._show_at_interrupt()
            if not self._ends():
                self._look(time.monotonic())

    def _ends(self) -> bool:
        """Whether Control-C is ending the program: then others are to see where it was before."""
        return time.monotonic() - self._pipe.interrupted < _ENDS_WITHIN

    def _look(self, now: float) -> None:
        moves = (count := collectives_begun()) != self._begun
        if moves:
            self._begun, self._moved, self._came, self._seen, self._shown = count, now, now, (), 0
            self._outdated = self._written is not None
        if self._outdated and self._may_note(now):
            self._write(Note("moves", host=self._host), now)
            self._written, self._outdated = None, False
        if moves or now - self._moved < self._quiet:
            return
        if (signature := place.signature(self._watched)) != self._seen:
            # The first look after a collective: it is there that the rank waits.
            self._came = now if self._seen else self._moved
            self._seen, self._shown = signature, 0
        where = place.place_of(self._watched)
        if where is None:
            return
        if not where.waits and now - self._came >= self._limit and self._device_works():
            # In one place for so long while the device works: it waits for that, and that for the other ranks.
            where = replace(where, waits=True)
        self._tell(where, now)
        if self._abort and now - self._asked_at >= self._pause:
            self._end_with_others(now)
        if where.waits and now - self._came >= self._limit * 2**self._shown:
            self._shown += 1
            self._show(self._shown)

    def _may_note(self, now: float) -> bool:
        return now - self._written_at >= self._pause

    def _tell(self, where: place.Place, now: float) -> None:
        """Note where this rank is, if that is news."""
        old, kind = self._written, "waits" if where.waits else "runs"
        is_news = old is None or (old.kind, old.call, old.line) != (kind, where.call, where.line)
        if not is_news or not self._may_note(now):
            return
        full = place.place_of(self._watched, stack=True) or where
        since = time.time() - (now - self._came)
        self._write(Note(kind, where.call, where.line, since, host=self._host, stack=full.stack), now)
        self._outdated = False

    def _write(self, note: Note, now: float) -> None:
        with suppress(RuntimeError, OSError):
            self._written_at = now
            self._notes.write(self._rank, note)
            self._written = note

    def _show(self, number: int) -> None:
        """Show all ranks, unless another one does."""
        try:
            # Other ranks come to the same number within moments; since the one before half of the wait has passed.
            if not self._notes.take_turn(self._limit * 2.0 ** (max(number - 2, 0) - 1)):
                return
            notes = self._notes.read()
        except (RuntimeError, OSError, ValueError):
            own = self._written or roll.SILENT
            notes = [own if rank == self._rank else roll.SILENT for rank in range(self._notes.size)]
        show(notes, self._save(roll.in_full(notes)), self._notes.headline)
        if self._abort:
            print("The run ends here, because of `--hang_timeout_action abort`.", file=sys.stderr, flush=True)
            with suppress(RuntimeError, OSError):
                self._notes.end_run()
                time.sleep(self._pause + 2 * _LOOK)  # the store may end with this rank: all have asked by then
            os._exit(limits.ABORTED)

    def _end_with_others(self, now: float) -> None:
        """End if another rank has ended the run: not every launcher ends all when one has failed."""
        self._asked_at = now
        with suppress(RuntimeError, OSError):
            if self._notes.is_to_end():
                os._exit(limits.ABORTED)

    def _show_at_interrupt(self) -> None:
        """Control-C in a hang: before all ranks end, who waited where."""
        if self._written is None or self._written.kind != "waits":
            return
        with suppress(RuntimeError, OSError, ValueError):
            if self._notes.is_first_interrupted():
                notes = self._notes.read()
                show(notes, self._save(roll.in_full(notes)), self._notes.headline)

    def _save(self, text: str) -> Path | None:
        """Append to the file of this hang; None where none can be written."""
        import tempfile

        name = f"accelerate-hang-{time.strftime('%Y%m%d-%H%M%S')}-rank{self._rank}.txt"
        for path in [self._file] if self._file is not None else [Path.cwd() / name, Path(tempfile.gettempdir()) / name]:
            with suppress(OSError), open(path, "a", encoding="utf-8") as file:
                file.write(f"{time.ctime()}\n{text}\n\n")
                self._file = path
                return path
        return None


class _Pipe:
    """Wakes the thread of a watch: to end it, and at signals, which the thread that trains sees only after its call."""

    def __init__(self) -> None:
        self.interrupted = float("-inf")  # when Control-C was last seen
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._listens = False
        with suppress(ValueError):  # only the main thread may ask for signals
            before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._listens = before == -1
            if not self._listens:
                signal.set_wakeup_fd(before)  # somebody else listens already

    def wait(self, seconds: float) -> bytes | None:
        """The signals that have come, after so long at most; None when it is over."""
        if not select.select([self._reading], [], [], seconds)[0]:
            return b""
        signals = os.read(self._reading, 4096)
        if signal.SIGINT in signals:
            self.interrupted = time.monotonic()
        return None if b"\0" in signals else signals

    def end(self) -> None:
        os.write(self._writing, b"\0")

    def close(self) -> None:
        if self._listens:
            try:
                if (now := signal.set_wakeup_fd(-1)) != self._writing:
                    signal.set_wakeup_fd(now)
            except ValueError:
                return  # in another thread: signals are still written there
        os.close(self._reading)
        os.close(self._writing)


def show(notes: list[Note], file: Path | None = None, headline: str = Notes.headline) -> None:
    """The roll on the screen."""
    where = f" All stacks are in {file}." if file is not None else ""
    text = f"\n{headline}: {roll.in_one_line(notes)}.\n{roll.likely_reason(notes)}{where}\n"
    print(text, file=sys.stderr, flush=True, end="")


_watch: HangWatch | None = None


def start(world: World, attempt: str, environ: Any, device_works: Callable[[], bool]) -> None:
    """Begin to watch this rank. Called by all of them, in the thread that trains.

    device_works: whether its device has work that is not done.
    """
    global _watch
    limit, abort = limits.limit_from(environ), limits.aborts(environ)
    stop()
    if limit == 0:
        return
    try:
        store = own_connection(PATIENCE)
    except (RuntimeError, OSError):
        store = None
    if store is None:
        return
    notes = Notes(store, attempt, world.size)
    if world.rank == 0:
        notes.announce()
    _watch = HangWatch(notes, world.rank, limit, abort, device_works)
    _watch.start()


def stop() -> None:
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def current() -> HangWatch | None:
    return _watch


@atexit.register
def _leave() -> None:
    if _watch is not None:
        _watch.leave()
