"""The file of a project's runs: SQLite, with many writers, each of which may be killed at any moment.

Every write is one short transaction by a connection of its own. There is a rollback journal and no write-ahead log,
which needs memory that all writers share: ranks on several machines write through a network file system.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

FILE_NAME = "runs.sqlite"
VERSION = 1
# Marks the file as ours ("accl"), for programs that look at the first bytes of a file.
_APPLICATION = 0x6163636C
# How long SQLite itself waits for another writer. Who is late then tries again later, with what has come meanwhile.
PATIENCE = 5.0

_SCHEMA = (
    # key: known to all ranks. launch: the same for all attempts that one launcher has started. facts, config: JSON.
    """CREATE TABLE runs (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, launch TEXT, name TEXT NOT NULL,
        created REAL NOT NULL, facts TEXT NOT NULL, config TEXT NOT NULL)""",
    # space: where its number means this process. born: when it began, by which it is told from a later one with its
    # number. beat: seconds between signs of life, the last of which was at `seen`. state: NULL, "ended" or "died".
    """CREATE TABLE processes (run INTEGER NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL,
        host TEXT NOT NULL, space TEXT NOT NULL, pid INTEGER NOT NULL, born REAL, started REAL NOT NULL,
        seen REAL NOT NULL, beat REAL NOT NULL, state TEXT, reason TEXT, PRIMARY KEY (run, attempt, rank))
        WITHOUT ROWID""",
    # kind: "metric" or "system".
    """CREATE TABLE series (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, kind TEXT NOT NULL, rank INTEGER NOT NULL,
        name TEXT NOT NULL, UNIQUE (run, kind, rank, name))""",
    # number: in the order of logging, and growing over attempts. value: NULL is not a number.
    """CREATE TABLE points (series INTEGER NOT NULL, number INTEGER NOT NULL, step REAL NOT NULL, time REAL NOT NULL,
        value REAL, PRIMARY KEY (series, number)) WITHOUT ROWID""",
    # Of `count` steps up to `step`, in seconds: the median and the longest.
    """CREATE TABLE step_times (run INTEGER NOT NULL, rank INTEGER NOT NULL, time REAL NOT NULL, step INTEGER NOT NULL,
        count INTEGER NOT NULL, median REAL NOT NULL, longest REAL NOT NULL, PRIMARY KEY (run, rank, time))
        WITHOUT ROWID""",
    """CREATE TABLE events (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, rank INTEGER NOT NULL, time REAL NOT NULL,
        kind TEXT NOT NULL, text TEXT NOT NULL)""",
    "CREATE INDEX events_of_a_run ON events (run)",
)


def process_space() -> str:
    """Where the numbers of processes mean the same ones as here: the machine, or the container."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def born(pid: int) -> float | None:
    """When a process of this machine began; None where there is none of that number, or only what is left of one."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def began(pid: int) -> str:
    """When a process began, by a clock that nobody sets, where there is one: always the same text for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return str(born(pid))


def place(folder: str | os.PathLike[str]) -> Path:
    """The file of the runs of a folder."""
    return Path(folder).expanduser() / FILE_NAME


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction: all of it is in the file afterwards, or nothing. Makes the file where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")  # at once, and not with the first write, when it could no longer wait
        try:
            _prepare(connection, path)
            yield connection
        except BaseException:
            if connection.in_transaction:  # after some errors, such as a full disk, SQLite has done it by itself
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A view of the file at one moment."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: train with `log_with='local'` first, or name another folder.")
    try:
        with closing(_reader(path)) as connection:
            connection.execute("BEGIN")
            if check(connection, path) == 0:
                raise FileNotFoundError(f"{path} has no runs yet.")
            yield connection
    except sqlite3.Error as error:
        raise OSError(f"{path} cannot be read: {error}.") from error


def _reader(path: Path) -> sqlite3.Connection:
    # What a killed writer has left half-done is rolled back by the next who opens the file, which is a write.
    mode = "rw" if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "ro"
    place = path.absolute().as_uri()
    connection = sqlite3.connect(f"{place}?mode={mode}", uri=True, timeout=PATIENCE, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    if check(connection, path) == 0:
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def check(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the tables in a file; 0 for one that is empty."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise ValueError(f"{path} was written by a newer release of accelerate (tables of version {version}): update.")
    if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise ValueError(f"{path} holds other tables than those of runs: give another folder.")
    return version
