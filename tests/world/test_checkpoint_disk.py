"""Disks that are full, cannot be written to, or hold what other runs are writing."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpoint import commit
from accelerate.checkpoint.layout import Manifest
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
            assert "earlier checkpoints are unchanged; free some space, or choose a folder" in sentence
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


class Together:
    """Something of which every rank has a part."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self.accelerator._communicator.gather_objects(self.accelerator.process_index)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"ranks": [0, 1]}


def _asking_all(folder: str) -> int:
    run = Version(folder, automatic=False)
    run.accelerator.register_for_checkpointing(Together(run.accelerator))
    for behind in (False, True):
        run.save(behind)
        run.accelerator.wait_for_checkpoint()
    return run.loaded()


def test_an_object_may_ask_all_ranks_for_its_state(tmp_path: Path) -> None:
    assert run_world(_asking_all, 2, str(tmp_path)) == [0, 0]


def _accumulating(folder: str) -> None:
    run = Version(folder, automatic=False)
    run.accelerator.gradient_accumulation_steps = 2
    with run.accelerator.accumulate(run.model):
        run.accelerator.backward(run.model(torch.ones(2, 4)).sum())
    run.save()


class Refusing:
    """Something that one rank does not take back."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rank == 1:
            raise ValueError("not today")


def _refusing(folder: str) -> set[float]:
    run = Version(folder, automatic=False)
    run.accelerator.register_for_checkpointing(Refusing(run.accelerator.process_index))
    run.save()
    run.set(1)
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_1\.pkl does not fit the Refusing .*not today"):
        run.accelerator.load_state(run.folder)
    return run.values()


def test_an_object_that_one_rank_refuses_leaves_all_of_them_as_they_were(tmp_path: Path) -> None:
    assert run_world(_refusing, 2, str(tmp_path)) == [{1.0}, {1.0}]


def _refusing_model(folder: str) -> set[float]:
    run = Version(folder, automatic=False)
    run.save()
    run.set(1)

    def check(*args: Any) -> None:
        if run.accelerator.process_index == 1:
            raise ValueError("not today")

    run.accelerator.unwrap_model(run.model).register_load_state_dict_post_hook(check)
    with pytest.raises(CheckpointError, match=r"did not accept the weights .*not today"):
        run.accelerator.load_state(run.folder)
    return run.values()


def test_a_model_that_refuses_on_one_rank_is_as_it_was_on_all(tmp_path: Path) -> None:
    assert run_world(_refusing_model, 2, str(tmp_path)) == [{1.0}, {1.0}]


def _cannot_give_its_state(folder: str) -> tuple[str, int]:
    run = Version(folder, automatic=False)
    run.save()
    run.set(1)

    def check(*args: Any) -> None:
        if run.accelerator.process_index == 1:
            raise ValueError("not today")

    handle = run.accelerator.unwrap_model(run.model).register_state_dict_post_hook(check)
    with pytest.raises((CheckpointError, ValueError)) as caught:
        run.save()
    handle.remove()
    run.accelerator.wait_for_everyone()
    assert os.listdir(os.path.join(folder, "same", "own")) == ["value"]
    assert not [name for name in os.listdir(os.path.join(folder, "same")) if name.startswith(".")]
    return str(caught.value), run.loaded()


def test_a_model_that_cannot_give_its_state_on_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    for sentence, value in run_world(_cannot_give_its_state, 2, str(tmp_path)):
        assert "not today" in sentence and value == 0


def test_damage_in_a_file_of_a_rank_that_is_no_more(tmp_path: Path) -> None:
    run_world(_accumulating, 2, str(tmp_path))
    path = tmp_path / "same" / "gradients_1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception, match=r"gradients_1\.safetensors is damaged"):
        run_world(_load, 1, str(tmp_path), env=ALONE)


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
        "another machine of the same name": f".x.staging-{host}~00000001~{space}~{parent}~1",
        "half deleted": f".deleting-checkpoint_1-{host}~{boot}~{space}~{2**22 + 5}~1",
        "alive": f".y.staging-{host}~{boot}~{space}~{parent}~{commit._started(int(parent))}",
        "another machine": f".x.staging-elsewhere~{boot}~{space}~1~1",
        "another container": f".x.staging-{host}~{boot}~1~{2**22 + 5}~1",
        "no staging": ".x.staging-mine",
        "silent on another machine": f".x.staging-elsewhere~{boot}~{space}~2~1",
        "silent in another container": f".x.staging-{host}~{boot}~1~{2**22 + 6}~1",
        "silent and alive here": f".z.staging-{host}~{boot}~{space}~{parent}~{commit._started(int(parent))}",
    }
    for what, name in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
        if what.startswith("before"):
            os.utime(tmp_path / name, (1, time.time() - 11 * 60))
        if what.startswith("silent"):
            os.utime(tmp_path / name, (1, time.time() - 25 * 3600))
    commit.begin(commit.staging_for(tmp_path / "x"))
    left = {what for what, name in names.items() if (tmp_path / name).exists()}
    elsewhere = {"another machine", "another machine of the same name", "another container"}
    assert left == {"alive", "no staging", "silent and alive here", *elsewhere}


def test_the_time_of_day_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is alive keeps its name, also when the clock is put right while it saves."""
    psutil = pytest.importorskip("psutil")
    before = commit._identity()
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 1)
    assert commit._identity() == before and not commit._is_dead(before.rpartition("-")[2], 0)


def test_a_save_shows_that_it_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_BEAT", 0.01)
    os.utime(tmp_path, (1, 1))
    alive = commit.Alive(tmp_path)
    try:
        deadline = time.monotonic() + 30
        while tmp_path.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tmp_path.stat().st_mtime > 1
    finally:
        alive.stop()


def _taken_away(folder: str) -> str:
    """Another machine has cleared away the staging folder of a run that was asleep in the middle of a save."""
    run = Version(folder, automatic=False)
    run.save()
    run.set(1)
    write = Manifest.write

    def asleep(manifest: Manifest, path: Path) -> None:
        write(manifest, path)
        commit._discard(path.parent)

    Manifest.write = asleep  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        run.save()
    Manifest.write = write  # type: ignore[method-assign]
    assert run.loaded() == 0
    return str(caught.value)


def test_a_staging_folder_that_is_taken_away(tmp_path: Path) -> None:
    [sentence] = run_world(_taken_away, 1, str(tmp_path), env=ALONE)
    assert "(No such file or directory): earlier checkpoints are unchanged" in sentence


class OfRank:
    """Something that is not the same on all ranks."""

    def __init__(self, rank: int) -> None:
        self.state = {"rank": [rank] * (rank + 1)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state


def _on_each_machine(folder: str, everywhere: bool) -> tuple[Any, Any]:
    """Two ranks, each on a machine of its own with a disk of its own."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    machine = Path(folder, f"machine{rank}")
    machine.mkdir()
    os.chdir(machine)
    run = Version(".", automatic=False)
    run.accelerator.project_configuration.save_on_each_node = everywhere
    run.accelerator.register_for_checkpointing(OfRank(rank))
    for number in (1, 2):
        run.set(number)
        run.save()
    names = sorted(os.listdir("same"))
    try:
        found: Any = run.loaded()
    except CheckpointError as error:
        found = str(error)
    return names, found


def _damaged_on_the_second(folder: str, automatic: bool) -> list[str]:
    """Two machines as above; on the second one a file that all read goes bad."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    machine = Path(folder, f"machine{rank}")
    machine.mkdir()
    os.chdir(machine)
    run = Version(".", automatic)
    run.accelerator.project_configuration.save_on_each_node = True
    run.save()
    if rank == 1:
        [path] = Path().rglob("custom_checkpoint_0.pkl")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    run.accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError) as caught:
        run.loaded()
    return [str(caught.value)]


@pytest.mark.parametrize("automatic", [False, True], ids=["a folder", "the newest"])
def test_each_machine_looks_at_its_own_copy(tmp_path: Path, automatic: bool) -> None:
    for [sentence] in run_world(_damaged_on_the_second, 2, str(tmp_path), automatic):
        assert "custom_checkpoint_0.pkl is damaged" in sentence


@pytest.mark.parametrize("everywhere", [True, False])
def test_machines_with_disks_of_their_own(tmp_path: Path, everywhere: bool) -> None:
    first, second = run_world(_on_each_machine, 2, str(tmp_path), everywhere)
    shared = ["custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl", "model.safetensors", "optimizer.bin"]
    own = ["accelerate_manifest.json", "own", "random_states_{}.pkl"]
    assert first[0] == sorted([*shared, *(name.format(0) for name in own)])
    assert second[0] == sorted([*(shared if everywhere else []), *(name.format(1) for name in own)])
    if everywhere:
        assert first[1] == second[1] == 2
    else:  # as the setting says
        assert first[1] == second[1] and "is missing" in first[1]


def _wrong_folders(folder: str) -> list[str]:
    run = Version(folder, automatic=False)
    sentences = []
    calls = [run.accelerator.load_state, run.accelerator.save_state]
    for call in (lambda: calls[0](os.path.join(folder, "nowhere")), calls[0], calls[1]):
        with pytest.raises((CheckpointError, ValueError)) as caught:
            call()
        sentences.append(str(caught.value))
    return sentences


def test_all_ranks_say_the_same_of_a_wrong_folder(tmp_path: Path) -> None:
    first, second = run_world(_wrong_folders, 2, str(tmp_path))
    assert first == second
    assert first[0] == f"There is no folder {tmp_path / 'nowhere'}: pass the folder of a checkpoint."


def _refused_folders(folder: str) -> list[str]:
    accelerator = Version(folder, automatic=False).accelerator
    kinds = []
    for act in (accelerator.save_state, accelerator.load_state, partial(accelerator.load_state, "not there")):
        with pytest.raises(CheckpointError) as caught:
            act()
        kinds.append(type(caught.value).__name__)
    return kinds


def test_a_folder_that_only_the_first_rank_looks_at_is_refused_by_all_in_the_same_way(tmp_path: Path) -> None:
    assert run_world(_refused_folders, 2, str(tmp_path)) == [["WrongFolder"] * 3] * 2
