"""Saving behind the training: the state of the moment, the same guarantees, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpointing import verify_checkpoint
from accelerate.errors import CheckpointError
from accelerate.io import disk
from tests.harness import run_world
from tests.unit.checkpoint.test_save_load import Training
from tests.world.test_checkpoint_crash import Version


def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let nothing be written until the returned event is set."""
    go, write = threading.Event(), disk.write

    def waiting(*args: Any) -> None:
        assert go.wait(60)
        write(*args)

    monkeypatch.setattr(disk, "write", waiting)
    return go


@pytest.mark.parametrize("safe", [True, False])
def test_it_is_the_state_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool) -> None:
    run = Training()
    run.step()
    expected = run.state()
    go = held(monkeypatch)
    assert run.accelerator.save_state(tmp_path / "x", safe, async_save=True) == tmp_path / "x"
    draw = torch.rand(1)
    run.step()
    assert run.state() != expected and not (tmp_path / "x").exists()
    go.set()
    run.accelerator.wait_for_checkpoint()
    verify_checkpoint(tmp_path / "x")
    run.accelerator.load_state(tmp_path / "x")
    assert run.state() == expected and torch.equal(torch.rand(1), draw)


def test_the_next_save_waits_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Training()
    run.accelerator.save_state(tmp_path / "x", async_save=True)
    run.step()
    expected = run.state()
    run.accelerator.save_state(tmp_path / "x", async_save=True)
    run.accelerator.load_state(tmp_path / "x")
    assert run.state() == expected

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for ask in (run.accelerator.wait_for_checkpoint, lambda: run.accelerator.save_state(tmp_path / "y")):
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write", full)
            run.accelerator.save_state(tmp_path / "x", async_save=True)
            run.accelerator._background._thread.join()  # type: ignore[union-attr]
        with pytest.raises(
            CheckpointError, match=r"could not write .* \(No space left on device\): earlier checkpoints are unchanged"
        ):
            ask()
        run.accelerator.wait_for_checkpoint()  # said once
        # and logged at once, for a script that asks no more
        assert "The last checkpoint was not saved: " in caplog.text and "No space left" in caplog.text
        run.step()
        run.accelerator.load_state(tmp_path / "x")
        assert run.state() == expected
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        run.accelerator.save_state(tmp_path / "x", async_save=True)
        with pytest.raises(CheckpointError, match="No space left"):
            run.accelerator.end_training()
    assert os.listdir(tmp_path) == ["x"]


def test_tied_weights_stay_one(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from tests.unit.checkpoint.test_save_load import Tied

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Tied())
    for behind in (False, True):
        accelerator.save_state(tmp_path, safe_serialization=False, async_save=behind)
        accelerator.wait_for_checkpoint()
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin") as archive:
            assert sum("/data/" in name for name in archive.namelist()) == 5  # of six names


def test_a_script_may_go_elsewhere_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Training()
    go = held(monkeypatch)
    assert run.accelerator.save_state("x", async_save=True) == Path("x")
    monkeypatch.chdir(tmp_path / "elsewhere")
    go.set()
    run.accelerator.wait_for_checkpoint()
    verify_checkpoint(tmp_path / "x")
    assert os.listdir(tmp_path / "elsewhere") == []


SCRIPT = """
import sys, time, torch
from accelerate import Accelerator
from accelerate.checkpoint import save

def late(*args, write=save.write_parts):
    time.sleep(0.5)  # the script is over by now
    return write(*args)

save.write_parts = late
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2000, 2000))
accelerator.save_state(sys.argv[1], async_save=True)
"""


def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "x")], check=True)
    verify_checkpoint(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]


def _with_training_between(folder: str) -> list[int]:
    run = Version(folder, automatic=True)
    for number in range(5):
        run.set(number)
        run.save(behind=True)
        # Collectives of the training, while the save has its own.
        for _ in range(20):
            run.accelerator.gather(torch.ones(3))
    run.accelerator.wait_for_checkpoint()
    run.accelerator.wait_for_everyone()
    assert os.listdir(os.path.join(folder, "checkpoints")) == ["checkpoint_4"]
    return [run.loaded()]


def test_two_processes(tmp_path: Path) -> None:
    assert run_world(_with_training_between, 2, str(tmp_path)) == [[4], [4]]


def _one_fails(folder: str) -> str:
    run = Version(folder, automatic=False)
    run.save(behind=True)
    run.accelerator.wait_for_checkpoint()
    run.set(1)
    if run.accelerator.process_index == 1:

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        disk.write = full
    run.save(behind=True)
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.end_training()
    return str(caught.value)


def test_one_of_two_fails(tmp_path: Path) -> None:
    first, second = run_world(_one_fails, 2, str(tmp_path))
    assert first == second and first.startswith("Rank 1 could not write") and "random_states_1.pkl" in first
    assert not [name for name in os.listdir(tmp_path / "same") if name.startswith(".")]
    verify_checkpoint(tmp_path / "same")
