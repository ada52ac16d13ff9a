from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpoint.model_weights import save
from accelerate.io.disk import DRAFT, replacing


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    with open(target) as held, replacing(target) as draft, replacing(target) as other:
        assert draft != other  # of another thread, say
        draft.write_text("new")
        other.write_text("newer")
        assert target.read_text() == "old"
    assert held.closed and target.read_text() == "new"  # the outer one came last
    with pytest.raises(ZeroDivisionError), replacing(target) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


def test_links(tmp_path: Path) -> None:
    """An object is written where a link leads, as with `torch.save`. A model is not: it may be in a cache."""
    (tmp_path / "cache").write_text("of all")
    (tmp_path / "object").symlink_to(tmp_path / "cache")
    accelerator = Accelerator(cpu=True)
    save({"x": 1}, tmp_path / "object")
    assert (tmp_path / "object").is_symlink() and torch.load(tmp_path / "cache") == {"x": 1}
    model = tmp_path / "model" / "model.safetensors"
    model.parent.mkdir()
    model.symlink_to(tmp_path / "cache")
    accelerator.save_model(torch.nn.Linear(2, 2), model.parent)
    assert not model.is_symlink() and torch.load(tmp_path / "cache") == {"x": 1}


def test_drafts_of_a_killed_save_go_with_the_next_one(tmp_path: Path) -> None:
    left = [f".model.safetensors.12-ab{DRAFT}", f".model-00001-of-00002.safetensors.12-ab{DRAFT}"]
    others = [f".mine.safetensors.12-ab{DRAFT}", "notes.txt"]
    for name in (*left, *others):
        (tmp_path / name).write_text("")
    Accelerator(cpu=True).save_model(torch.nn.Linear(2, 2), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "model.safetensors"])


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*missing to save .*x\.pt to: create it first"):
        save({"x": 1}, tmp_path / "missing" / "x.pt")
