from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from accelerate.devices.free_memory import _room_in_control_groups
from accelerate.io.stored_tensors import FileRange
from accelerate.offload.locked_files import _TAKEN, LockedFiles

SIZE = 65536


class Driver:
    """What CUDA would do: it reads every page that it locks."""

    def __init__(self, refuse: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.refuse = refuse
        self.threads: set[str] = set()

    def lock(self, address: int, size: int) -> bool:
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        ctypes.string_at(address, size)
        self.threads.add(threading.current_thread().name)
        if not self.refuse:
            self.locked[address] = size
        return not self.refuse

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def files(self, room: int = 10**9) -> LockedFiles:
        return LockedFiles(self.lock, self.unlock, lambda: 2 * room)


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def write(path: Path, size: int) -> torch.Tensor:
    torch.manual_seed(0)
    content = torch.randint(0, 255, (size,), dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    return content


def test_weights_are_locked_in_the_background_and_unlocked_in_the_end(tmp_path: Path) -> None:
    path, driver = tmp_path / "weights", Driver()
    content = write(path, 4 * SIZE)
    first, odd = FileRange(str(path), 0, (SIZE,), torch.uint8), FileRange(str(path), SIZE + 3, (SIZE,), torch.int16)
    files = driver.files()
    assert files.find(first) is None
    files.add([first, odd])
    files.wait()
    assert driver.threads == {"page-lock"}
    for place in (first, odd):
        found = files.find(place)
        assert found is not None and torch.equal(found, content[place.offset : place.offset + place.nbytes])
        assert any(start <= found.data_ptr() < start + size for start, size in driver.locked.items())
    files.add([first, odd])
    files.wait()
    assert len(driver.locked) == 2
    del found
    files.close()
    assert driver.locked == {} and files.find(first) is None
    assert not is_mapped(path)


def test_the_file_is_the_one_that_was_kept(tmp_path: Path) -> None:
    path, driver = tmp_path / "weights", Driver()
    write(path, SIZE)
    place = FileRange(str(path), 0, (SIZE,), torch.uint8).kept()
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    os.replace(other, path)
    files = driver.files()
    files.add([place])
    files.wait()
    assert files.find(place) is None and driver.locked == {}  # it is read from its mapping
    files.close()


def test_a_file_that_was_written_anew_is_read_again(tmp_path: Path) -> None:
    path, driver = tmp_path / "weights", Driver()
    write(path, SIZE)
    place = FileRange(str(path), 0, (SIZE,), torch.uint8)
    files = driver.files()
    files.add([place])
    files.wait()
    assert files.find(place) is not None
    os.truncate(path, 100)
    assert files.find(place) is None
    files.add([place])  # too short
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    assert files.find(place) is None
    files.close()


def test_no_more_is_locked_than_there_is_room_for(tmp_path: Path) -> None:
    path, driver = tmp_path / "weights", Driver()
    write(path, 4 * SIZE)
    places = [FileRange(str(path), start * SIZE, (SIZE,), torch.uint8) for start in range(4)]
    files = driver.files(room=2 * SIZE + 10)
    files.add(places)
    files.wait()
    assert [files.find(place) is not None for place in places] == [True, True, False, False]
    others = driver.files(room=2 * SIZE + 10)  # the system calls free what is locked, since it is in files
    others.add(places)
    others.wait()
    assert [others.find(place) is not None for place in places] == [True, False, False, False]
    others.close()
    files.close()
    assert _TAKEN == {}


@pytest.mark.parametrize("case", ["refused", "empty", "gone", "short"])
def test_the_others_are_left_alone(tmp_path: Path, case: str) -> None:
    path, driver = tmp_path / "weights", Driver(refuse=case == "refused")
    size = 0 if case == "empty" else SIZE
    if case != "gone":
        write(path, size // 2 if case == "short" else size)
    place = FileRange(str(path), 0, (size,), torch.uint8)
    files = driver.files()
    files.add([place])
    files.wait()
    assert files.find(place) is None and driver.locked == {}
    assert not is_mapped(path)
    files.close()


def group(folder: Path, limit: str, taken: int, of_files: int, unified: bool) -> None:
    folder.mkdir(parents=True)
    names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{taken}\n")
    total = "" if unified else "total_"
    lists = f"{total}inactive_file {of_files // 4}\n{total}active_file {of_files - of_files // 4}\n"
    # Memory that processes share is called a file, too, and cannot be freed.
    (folder / "memory.stat").write_text(f"anon 7\nfile {of_files + 100}\n{total}shmem 100\n{lists}file_dirty 3\n")


@pytest.mark.parametrize("unified", [True, False])
def test_the_limits_of_control_groups_count(tmp_path: Path, unified: bool) -> None:
    own, system = tmp_path / "own", tmp_path / "system"
    own.write_text("0::/outer/inner\n" if unified else "9:cpu,memory:/outer/inner\n1:pids:/\n")
    top = system if unified else system / "memory"
    assert _room_in_control_groups(system, own) == float("inf")
    group(top / "outer", "1000", 500, 300, unified)
    assert _room_in_control_groups(system, own) == 800
    group(top / "outer" / "inner", "400" if not unified else "max", 100, 20, unified)
    assert _room_in_control_groups(system, own) == (800 if unified else 320)
    assert _room_in_control_groups(system, tmp_path / "missing") == float("inf")


def test_a_container_sees_only_its_own_group(tmp_path: Path) -> None:
    """The path that the process is told may be the one outside of the container."""
    own, system = tmp_path / "own", tmp_path / "system"
    own.write_text("0::/docker/4711\n")
    group(system, "900", 100, 0, unified=True)
    assert _room_in_control_groups(system, own) == 800
