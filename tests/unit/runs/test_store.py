"""The file of runs: many writers, nothing half-written, and not mistaken for another."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest

from accelerate.runs import store
from accelerate.runs.read import Project, find
from tests.harness import run_world, world_outcomes
from tests.unit.runs.toys import runs_of, values, write

COUNT = 300


def write_one(folder: str) -> None:
    write(Path(folder), f"run {os.environ['RANK']}", [{"loss": float(step)} for step in range(COUNT)])


def test_runs_that_write_at_once_keep_all_of_it(tmp_path: Path) -> None:
    run_world(write_one, 4, str(tmp_path))
    project = Project(store.place(tmp_path))
    runs = project.runs()
    assert sorted(run.name for run in runs) == [f"run {rank}" for rank in range(4)]
    for run in runs:
        assert run.state == "ended"
        assert values(project, run, "loss") == [(step, step) for step in range(COUNT)]


def test_a_transaction_is_whole_or_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(KeyError), store.writing(path) as connection:
        connection.execute("DELETE FROM runs")
        raise KeyError
    assert len(runs_of(path)) == 1
    with pytest.raises(KeyError), store.writing(path) as connection:
        connection.execute("ROLLBACK")  # as SQLite does by itself when the disk is full
        raise KeyError


def killed_in_the_middle(folder: str) -> None:
    with store.writing(store.place(folder)) as connection:
        connection.execute("PRAGMA cache_size = 1")  # so that what is not complete is in the file already
        connection.execute("UPDATE runs SET name = 'half'")
        connection.executemany(
            "INSERT INTO events (run, rank, time, kind, text) VALUES (1, 0, 0, 'x', ?)", [("x" * 4000,)] * 500
        )
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_is_killed_leaves_what_was_before(tmp_path: Path) -> None:
    path = write(tmp_path, "whole", [{"loss": 1.0}])
    size = path.stat().st_size
    [outcome] = world_outcomes(killed_in_the_middle, 1, str(tmp_path))
    assert outcome.signal == "SIGKILL"
    assert path.stat().st_size > size and path.with_name(f"{path.name}-journal").exists()
    [run] = runs_of(path)
    assert (run.name, run.events, len(run.metrics)) == ("whole", [], 1)
    write(tmp_path, "next")
    assert [run.name for run in runs_of(path)] == ["whole", "next"]
    assert path.stat().st_size <= size + 4096


def test_there_is_no_write_ahead_log(tmp_path: Path) -> None:
    path = write(tmp_path, logs=[{"a": 1}])
    with store.reading(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert [each.name for each in tmp_path.iterdir()] == [store.FILE_NAME]


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, logs=[{"a": 1}])
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        assert len(runs_of(path)) == 1
    finally:
        tmp_path.chmod(0o700)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    path = store.place(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    with pytest.raises(ValueError, match=r"runs\.sqlite holds other tables than those of runs: give another folder"):
        runs_of(path)
    with pytest.raises(ValueError, match="holds other tables"), store.writing(path):
        pass
    path.unlink()
    path.touch()
    with pytest.raises(OSError, match=r"runs\.sqlite has no runs yet\."):
        runs_of(path)
    path.write_text("text" * 1000)
    with pytest.raises(OSError, match=r"runs\.sqlite cannot be read: file is not a database\."):
        runs_of(path)
    path.unlink()
    with store.writing(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match=r"written by a newer release of accelerate \(tables of version 99\)"):
        runs_of(path)


def test_which_file_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="There are no runs in"):
        find(None)
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere"):
        find("nowhere")
    first = write(tmp_path / "a" / "b")
    assert find(None).resolve() == find(str(first)).resolve() == find("a/b").resolve() == first
    write(tmp_path / "c")
    with pytest.raises(ValueError, match="runs in several folders, so name one of them: a/b, c"):
        find(None)
    assert find("c") == Path("c") / store.FILE_NAME
