"""One folder, and several who save to it or load from it at the same time."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from accelerate import Accelerator
from accelerate.checkpoint import agreement, commit, layout, load
from accelerate.checkpoint.agreement import Background
from accelerate.checkpoint.layout import Manifest
from accelerate.checkpointing import verify_checkpoint
from accelerate.errors import CheckpointError
from accelerate.io import disk
from accelerate.utils import ProjectConfiguration
from tests.unit.accelerator.toys import Net, weights


def _fill(model: Any, value: float) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(value)


def _saved(folder: Path, value: float) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    _fill(model, value)
    accelerator.save_state(folder)
    return accelerator, model


class _AnotherRun:
    """Saves to a folder, as another process does; `break_off` before its files are in place."""

    def __init__(self, source: Path, target: Path, break_off: bool = False) -> None:
        self.source, self.target, self.break_off = source, target, break_off

    def __call__(self) -> None:
        staging = self.target / f"{layout.STAGING}another"
        shutil.copytree(self.source, staging)
        manifest = Manifest.read(staging)
        assert manifest is not None
        commit.publish(staging, self.target, manifest)
        if not self.break_off:
            commit.finish_replacement(self.target)


@pytest.mark.parametrize("break_off", [False, True])
@pytest.mark.parametrize("when", ["_check_custom", "read_objects"])
def test_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, break_off: bool) -> None:
    _saved(tmp_path / "new", 2)
    accelerator, model = _saved(tmp_path / "x", 1)
    others = [_AnotherRun(tmp_path / "new", tmp_path / "x", break_off)]
    plain = getattr(load, when)

    def then(*args: Any, **kwargs: Any) -> Any:
        if others:
            others.pop()()
        return plain(*args, **kwargs)

    monkeypatch.setattr(load, when, then)
    _fill(model, 0)
    accelerator.load_state(tmp_path / "x")
    assert weights(model).unique().tolist() == [2]


def test_a_replacement_that_ends_while_the_reader_asks_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader looks at the manifest, and whether files are being moved: the move must not end between the two."""
    _saved(tmp_path / "new", 2)
    accelerator, model = _saved(tmp_path / "x", 1)
    other, plain = _AnotherRun(tmp_path / "new", tmp_path / "x", break_off=True), commit.mark
    committed, looks = tmp_path / "x" / layout.COMMITTED, list[Path]()

    def move_all_but_the_manifest() -> None:
        other()
        for path in committed.iterdir():
            if path.name != layout.MANIFEST:
                path.rename(tmp_path / "x" / path.name)

    def look(folder: Path) -> Any:
        found = plain(folder)
        looks.append(folder)
        if len(looks) == 1:
            move_all_but_the_manifest()
        elif committed.exists():
            commit.finish_replacement(folder)
        return found

    monkeypatch.setattr(commit, "mark", look)
    _fill(model, 0)
    accelerator.load_state(tmp_path / "x")
    assert weights(model).unique().tolist() == [2]


def test_replaced_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved(tmp_path / "new", 2)
    accelerator, model = _saved(tmp_path / "x", 1)
    other, plain = _AnotherRun(tmp_path / "new", tmp_path / "x"), load.read_objects

    def then(*args: Any, **kwargs: Any) -> Any:
        other()
        return plain(*args, **kwargs)

    monkeypatch.setattr(load, "read_objects", then)
    monkeypatch.setattr(load, "_PATIENCE", 0.0)
    _fill(model, 0)
    with pytest.raises(
        CheckpointError, match="was replaced by another run while it was being read, so nothing was loaded"
    ):
        accelerator.load_state(tmp_path / "x")
    assert weights(model).unique().tolist() == [0]


def test_replaced_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside runs that save without a pause: it takes a while, and goes well."""
    _saved(tmp_path / "new", 2)
    accelerator, model = _saved(tmp_path / "x", 1)
    others, plain = [_AnotherRun(tmp_path / "new", tmp_path / "x")] * 25, load.read_objects

    def then(*args: Any, **kwargs: Any) -> Any:
        if others:
            others.pop()()
        return plain(*args, **kwargs)

    monkeypatch.setattr(load, "read_objects", then)
    _fill(model, 0)
    accelerator.load_state(tmp_path / "x")
    assert weights(model).unique().tolist() == [2] and not others


def test_two_runs_publish_one_after_the_other(tmp_path: Path) -> None:
    _saved(tmp_path / "2", 2)
    _saved(tmp_path / "3", 3)
    accelerator, model = _saved(tmp_path / "x", 1)
    for number in (2, 3):
        _AnotherRun(tmp_path / str(number), tmp_path / "x", break_off=True)()
    accelerator.load_state(tmp_path / "x")
    assert weights(model).unique().tolist() == [3]


@pytest.mark.parametrize("what", ["save", "load"])
def test_one_process_at_a_time_moves_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    _saved(tmp_path / "new", 2)
    accelerator, model = _saved(tmp_path / "x", 1)
    _AnotherRun(tmp_path / "new", tmp_path / "x", break_off=True)()
    act = accelerator.save_state if what == "save" else accelerator.load_state
    with commit._alone_in(tmp_path / "x"), monkeypatch.context() as patched:
        patched.setattr(commit, "_PATIENCE", 0.05)
        with pytest.raises(CheckpointError, match="Another process has been replacing the checkpoint in"):
            act(tmp_path / "x")
    act(tmp_path / "x")
    verify_checkpoint(tmp_path / "x")
    assert weights(model).unique().tolist() == ([1] if what == "save" else [2])


def test_two_accelerators_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cell of a notebook that is run again while its first save is still being written."""
    _saved(tmp_path / "x", 1)
    write, wait, second = disk.write, Background.wait, threading.Event()

    def write_later(*args: Any) -> None:
        assert second.wait(60), "the first save is being written until the second one waits for it"
        write(*args)

    def noted(waiting: Background) -> None:
        if agreement._writing:
            second.set()
        wait(waiting)

    monkeypatch.setattr(disk, "write", write_later)
    monkeypatch.setattr(Background, "wait", noted)
    runs = []
    for value in (2, 3):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(Net())
        _fill(model, value)
        accelerator.save_state(tmp_path / "x", async_save=True)
        runs.append((accelerator, model))
    for accelerator, _ in runs:
        accelerator.wait_for_checkpoint()
    verify_checkpoint(tmp_path / "x")
    accelerator, model = runs[0]
    accelerator.load_state(tmp_path / "x")
    assert weights(model).unique().tolist() == [3]


def test_a_save_that_comes_between(tmp_path: Path) -> None:
    """As from a handler of signals, which runs in the middle of whatever the thread is doing."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    found = []

    def hook(models: Any, states: Any, folder: str) -> None:
        with pytest.raises(CheckpointError, match="set a flag in the handler, and save in the loop") as info:
            accelerator.save_state(tmp_path / "between")
        found.append(info)

    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(tmp_path / "x")
    assert found and not (tmp_path / "between").exists()
    accelerator.load_state(tmp_path / "x")


def test_an_old_checkpoint_that_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=config)
    accelerator.prepare(Net())
    oldest, plain = accelerator.save_state(), disk.rename

    def rename(source: Path, target: Path) -> None:
        if source == oldest:
            raise OSError(16, "Device or resource busy", str(source))
        plain(source, target)

    monkeypatch.setattr(disk, "rename", rename)
    with caplog.at_level(logging.WARNING):
        folders = [accelerator.save_state() for _ in range(2)]
    assert "checkpoint_0 is an older checkpoint than `total_limit` keeps and was not deleted" in caplog.text
    assert [folder.name for folder in folders] == ["checkpoint_1", "checkpoint_2"]
    verify_checkpoint(folders[1])


def test_a_folder_with_a_name_like_that_of_a_run(tmp_path: Path) -> None:
    host, boot, space, _, _ = commit._identity().rsplit("~", 4)
    (tmp_path / f".x{layout.STAGING}{host}~{boot}~{space}~\u00b2~1").mkdir()
    accelerator, _ = _saved(tmp_path / "x", 1)
    accelerator.load_state(tmp_path / "x")
