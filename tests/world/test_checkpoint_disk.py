"""Disks that are full, cannot be written to, or hold what other runs are writing."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accelerate.checkpoint import commit
from accelerate.errors import CheckpointError
from tests.harness import run_world
from tests.unit.accelerator.toys import ALONE
from tests.world.test_checkpoint_crash import Version


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system in memory at `folder`; needs the rights of an administrator."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(exist_ok=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options.encode()) != 0:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(folder), 2)


def _until_full(folder: str) -> list[str]:
    run = Version(folder, automatic=True)
    run.accelerator.project_configuration.total_limit = None
    sentences = []
    for number in range(1000):
        run.set(number)
        try:
            run.save()
        except CheckpointError as error:
            sentences.append(str(error))
            break
    run.accelerator.wait_for_everyone()  # the first process clears away what it has begun
    names = os.listdir(os.path.join(folder, "checkpoints"))
    assert sorted(names) == sorted(f"checkpoint_{n}" for n in range(number)), names
    assert run.loaded() == number - 1
    # With room again it goes on.
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        commit.prune([Path(folder, "checkpoints", name) for name in sorted(names)], 1)
    run.set(number)
    run.save()
    assert run.loaded() == number
    return sentences


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk(tmp_path: Path, processes: int) -> None:
    with mounted(tmp_path / "small", "size=160k"):
        for said in run_world(_until_full, processes, str(tmp_path / "small")):
            [sentence] = said
            assert "could not write" in sentence and "No space left on device" in sentence
            assert "what was there before is as it was; free some space, or choose a folder" in sentence
            assert "\n" not in sentence and str(tmp_path) in sentence


def _limited(folder: str) -> str:
    run = Version(folder, automatic=False)
    run.save()
    run.set(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        run.save()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert run.loaded() == 0
    assert not [name for name in os.listdir(os.path.join(folder, "same")) if name.startswith(".")]
    return str(caught.value)


def test_a_limit_on_files(tmp_path: Path) -> None:
    [sentence] = run_world(_limited, 1, str(tmp_path), env=ALONE)
    assert "optimizer.bin (File too large)" in sentence


def _refused(folder: str) -> str:
    run = Version(folder, automatic=False)
    with pytest.raises(CheckpointError) as caught:
        run.save()
    return str(caught.value)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, processes: int) -> None:
    with mounted(tmp_path / "ro", "ro"):
        for sentence in run_world(_refused, processes, str(tmp_path / "ro")):
            assert "(Read-only file system)" in sentence and "choose a folder that can be written to" in sentence


def _load(folder: str) -> int:
    return Version(folder, automatic=False).loaded()


def _save(folder: str) -> None:
    Version(folder, automatic=False).save()


def test_a_checkpoint_on_a_read_only_disk_is_loaded(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", ""):
        run_world(_save, 1, str(tmp_path / "disk"), env=ALONE)
        libc = ctypes.CDLL(None, use_errno=True)
        remount_read_only = 32 | 1
        assert libc.mount(b"tmpfs", os.fsencode(tmp_path / "disk"), b"tmpfs", remount_read_only, b"") == 0
        assert run_world(_load, 1, str(tmp_path / "disk"), env=ALONE) == [0]


def _missing_rank_file(folder: str) -> str:
    run = Version(folder, automatic=False)
    run.save()
    run.set(1)
    name = os.path.join(folder, "same", "random_states_1.pkl")
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        os.remove(name)
    run.accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.load_state(run.folder)
    assert run.values() == {1.0}
    return str(caught.value)


def test_a_missing_rank_file(tmp_path: Path) -> None:
    sentences = run_world(_missing_rank_file, 2, str(tmp_path))
    assert sentences[0] == sentences[1] and "random_states_1.pkl is missing" in sentences[0]


def test_only_what_the_dead_have_left_is_cleared_away(tmp_path: Path) -> None:
    mine = commit._identity()
    host, boot, space, pid, _ = mine.rsplit("~", 4)
    parent = str(os.getppid())
    names = {
        "dead": f".x.staging-{host}~{boot}~{space}~{2**22 + 5}~1",
        "another process of the same number": f".x.staging-{host}~{boot}~{space}~{pid}~1",
        "before the last start of the machine": f".x.staging-{host}~00000000~{space}~{parent}~1",
        "half deleted": f".deleting-checkpoint_1-{host}~{boot}~{space}~{2**22 + 5}~1",
        "alive": f".y.staging-{host}~{boot}~{space}~{parent}~{commit._started(int(parent))}",
        "another machine": f".x.staging-elsewhere~{boot}~{space}~1~1",
        "another container": f".x.staging-{host}~{boot}~1~{2**22 + 5}~1",
        "no staging": ".x.staging-mine",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
    commit.begin(tmp_path / "x")
    left = {what for what, name in names.items() if (tmp_path / name).exists()}
    assert left == {"alive", "another machine", "another container", "no staging"}
