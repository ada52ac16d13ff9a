"""Where a checkpoint grows and how it gets to its place, in folders of all kinds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from accelerate import Accelerator
from accelerate.checkpoint import commit, layout
from accelerate.checkpointing import verify_checkpoint
from accelerate.errors import CheckpointError
from accelerate.utils import ProjectConfiguration
from tests.unit.accelerator.toys import Net, weights


def _dead() -> str:
    host, boot, space, _, _ = commit._identity().rsplit("~", 4)
    return f"{host}~{boot}~{space}~{2**22 + 5}~1"


def _fill(model: Any, value: float) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(value)


def _with_folder(models: Any, states: Any, folder: str) -> None:
    Path(folder, "own").mkdir()
    Path(folder, "own", "file").write_text("text")


def test_killed_when_all_but_empty_folders_are_in_place(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    hook = accelerator.register_save_state_pre_hook(_with_folder)
    folder = accelerator.save_state(tmp_path / "x")
    (folder / layout.COMMITTED / "own").mkdir(parents=True)
    verify_checkpoint(folder)
    accelerator.load_state(folder)
    _fill(model, 2)
    accelerator.save_state(folder)
    _fill(model, 3)
    accelerator.load_state(folder)
    assert weights(model).unique().tolist() == [2] and not (folder / layout.COMMITTED).exists()
    hook.remove()
    accelerator.save_state(folder)
    assert not (folder / "own").exists()


def test_names_of_the_longest_kind(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    folder = tmp_path / ("ü" * 125)
    for _ in range(2):
        accelerator.load_state(accelerator.save_state(folder))
    leftover = commit.staging_for(tmp_path / ("n" * 250))
    dead = leftover.with_name(leftover.name.replace(commit._identity(), _dead()))
    dead.mkdir()
    accelerator.save_state(tmp_path / ("n" * 250))
    commit.prune([folder], 0)
    assert os.listdir(tmp_path) == ["n" * 250]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_stays(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "x"
    if kind == "file":
        target.write_text("text")
    else:
        target.symlink_to(tmp_path / "nowhere")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    with pytest.raises(CheckpointError, match="x is a file or a broken link, not a folder"):
        accelerator.save_state(target)
    assert os.listdir(tmp_path) == ["x"] and (kind == "link" or target.read_text() == "text")


def test_a_checkpoint_behind_a_link(tmp_path: Path) -> None:
    """Is replaced where it is, and when its turn to be deleted has come the link goes."""
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=config)
    accelerator.prepare(Net())
    first = accelerator.save_state()
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    verify_checkpoint(first)
    accelerator.save_state()
    assert os.listdir(first.parent) == ["checkpoint_1"]
    verify_checkpoint(tmp_path / "elsewhere")


def test_what_a_first_save_has_left_is_cleared_away_by_later_ones(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    accelerator.save_state(tmp_path / "x")
    (tmp_path / f".x{layout.STAGING}{_dead()}").mkdir()
    accelerator.save_state(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]


def test_what_cannot_be_cleared_away_is_left(tmp_path: Path) -> None:
    """It may belong to another user, or another run may be clearing it away at this moment."""
    left = tmp_path / f".y{layout.STAGING}{_dead()}"
    left.mkdir()
    taken = tmp_path / f"{layout.DELETING}{left.name}-{commit._identity()}"
    taken.mkdir()
    (taken / "file").write_text("text")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    accelerator.save_state(tmp_path / "x")
    accelerator.load_state(tmp_path / "x")
    assert left.exists()


def _failing(*arguments: Any) -> None:
    raise OSError("no such tokenizer")


def _reading(models: Any, folder: str) -> None:
    Path(folder, "nothing").read_text()


def test_errors_of_hooks_are_said_as_they_are(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    folder = accelerator.save_state(tmp_path / "x")
    handle = accelerator.register_save_state_pre_hook(_failing)
    with pytest.raises(CheckpointError, match=r"Rank 0 could not .*\(OSError: no such tokenizer\)"):
        accelerator.save_state(folder)
    handle.remove()
    accelerator.register_load_state_pre_hook(_reading)
    with pytest.raises(CheckpointError, match=r"could not write or read .*nothing \(No such file or directory\)"):
        accelerator.load_state(folder)


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = accelerator.prepare(Net())
    _fill(model, 2)
    accelerator.save_state()
    damaged = accelerator.save_state()
    (damaged / layout.MANIFEST).unlink()
    (damaged / layout.MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match=rf"{layout.MANIFEST} cannot be read \(Is a directory\)"):
        verify_checkpoint(damaged)
    _fill(model, 3)
    accelerator.load_state()
    assert weights(model).unique().tolist() == [2]


@pytest.mark.parametrize("killed", [False, True])
def test_a_damaged_manifest_is_replaced_with_the_rest(tmp_path: Path, killed: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    folder = accelerator.save_state(tmp_path / "x")
    _fill(model, 2)
    if killed:  # when the new one was there, and had not replaced the old one
        new = accelerator.save_state(tmp_path / "y")
        new.rename(folder / layout.COMMITTED)
    (folder / layout.MANIFEST).write_text("nothing")
    if not killed:
        accelerator.save_state(folder)
    _fill(model, 3)
    accelerator.load_state(folder)
    assert weights(model).unique().tolist() == [2]


def test_a_flipped_bit_in_a_manifest(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    folder = accelerator.save_state(tmp_path / "x")
    content = (folder / layout.MANIFEST).read_bytes()
    for place in range(0, len(content), 7):
        if content[place : place + 1] in b" \n":
            continue  # between two words
        damaged = bytearray(content)
        damaged[place] ^= 1
        (folder / layout.MANIFEST).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=layout.MANIFEST):
            verify_checkpoint(folder)
