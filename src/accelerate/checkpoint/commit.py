"""Committing a checkpoint to disk: completely, or not at all.

It is written to a staging folder. A new checkpoint is that folder, renamed. To replace a checkpoint, the finished
staging folder is renamed to `.accelerate-committed` inside the old one: from then on the new one is valid. Its files
are then moved into place, and whoever finds an interrupted move (a load, a later save) finishes it. Nothing else in
the folder is touched, so it may be anything: the working folder, a mounted disk, a folder with the user's own files.

One process at a time moves files in a folder (`_alone_in`): an evaluation may load what a training keeps saving, and
whichever of them finds an interrupted move finishes it.

Machines that share no disk each have their own folder. The new checkpoint is valid once it exists on all of them: until
then none moves its files or deletes an older one, and what does not exist everywhere is rolled back
(`agreement.settle`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate.checkpoint import layout
from accelerate.checkpoint.layout import Manifest
from accelerate.errors import CheckpointError
from accelerate.io import disk
from accelerate.io.disk import started

logger = logging.getLogger(__name__)

# A save says that it is alive this often, and what was not touched for so long is of a run that has died elsewhere.
_BEAT = 60.0
_DEAD_AFTER = 24 * 3600.0
# Where only the names of two machines are the same.
_SILENT_AFTER = 10 * _BEAT
# In bytes; most file systems take 255, encrypted ones less.
_LONGEST_NAME = 140
# How long one process waits for another that moves files in the same folder, which takes moments.
_PATIENCE = 60.0
# What is left of a run that died while it saved or deleted: the name ends with its identity.
_LEFT_BEHIND = re.compile(rf"(?:{re.escape(layout.STAGING)}|^{re.escape(layout.DELETING)}.*-)([^-]+)$")


def staging_for(target: Path) -> Path:
    """The staging folder for `target`: beside it, or inside it if it exists. Its name identifies this run."""
    if target.is_dir():
        return target / f"{layout.STAGING}{_identity()}"
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is a file or a broken link, not a folder: choose another one.")
    return _beside(target, ".", f"{layout.STAGING}{_identity()}")


def _beside(folder: Path, before: str, after: str) -> Path:
    """A path beside a folder, named after it; after a digest of its name if that would be too long for some disks."""
    name = f"{before}{folder.name}{after}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f"{before}{hashlib.sha256(os.fsencode(folder.name)).hexdigest()[:16]}{after}"
    return folder.with_name(name)


def begin(staging: Path) -> None:
    """Create the staging folder, and delete those that dead runs have left."""
    disk.wait_until_freed()  # the room of what the last save has replaced may be needed now
    disk.remove_tree(staging)  # of an earlier save of this run, which failed
    disk.make_folder(staging)
    now = staging.stat().st_mtime
    _clean(staging.parent, now)
    if staging.name.startswith(layout.STAGING):  # inside of what it will replace
        _clean(staging.parent.parent, now)  # where the first save of it may have died
        with _alone_in(staging.parent):
            if pending(staging.parent) is None:
                disk.remove_tree(staging.parent / layout.COMMITTED)  # all of it is in place, but for empty folders


class Alive:
    """Touches a staging folder from time to time, so that other machines see that its run is alive."""

    def __init__(self, staging: Path) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(staging,), name="accelerate-alive", daemon=True)
        self._started = started(self._thread)  # the last save of a program may do without

    def _run(self, staging: Path) -> None:
        while not self._over.wait(_BEAT):
            with suppress(OSError):
                os.utime(staging)

    def stop(self) -> None:
        self._over.set()
        if self._started:
            self._thread.join()


def publish(staging: Path, target: Path, manifest: Manifest) -> None:
    """Turn a finished staging folder into the checkpoint, or into the one that will replace an existing one."""
    for folder, _, _ in os.walk(staging):
        disk.sync_folder(Path(folder))
    manifest.write(staging / layout.MANIFEST)
    disk.sync_folder(staging)
    if target.is_dir():
        with _alone_in(target):
            if pending(target) is not None:  # of another run that saves to the same folder
                _move_in(target)
            disk.rename(staging, target / layout.COMMITTED)
            disk.sync_folder(target)
    else:
        disk.rename(staging, target)
        disk.sync_folder(target.parent)


def withdraw(target: Path, save: str) -> None:
    """Undo `publish`, if it has failed on another machine."""
    with _alone_in(target):
        if pending(target) == save:
            _discard(target / layout.COMMITTED)
        elif save_in(target) == save:
            _discard(target)


def save_in(target: Path) -> str | None:
    """The id of the save that wrote the checkpoint in a folder; None if it has none."""
    manifest = _manifest_if_readable(target)
    return None if manifest is None else manifest.save


def _manifest_if_readable(target: Path) -> Manifest | None:
    """The manifest of the checkpoint in a folder, if it can be read. A damaged one may be replaced, too."""
    try:
        return Manifest.read(target)
    except CheckpointError:
        return None


def pending(target: Path) -> str | None:
    """The id of the save that is about to replace the checkpoint in a folder; None if there is none."""
    manifest = Manifest.read(target / layout.COMMITTED)
    return None if manifest is None else manifest.save


def finish_replacement(target: Path) -> None:
    """Move the files of a replacement into place, all of them or what an interruption has left; if there is one."""
    if pending(target) is not None:
        with _alone_in(target):
            if pending(target) is not None:  # nobody else has done it meanwhile
                _move_in(target)


def roll_back(target: Path) -> None:
    """Delete a replacement, if there is one: the checkpoint stays what it was."""
    committed = target / layout.COMMITTED
    if committed.is_dir():
        with _alone_in(target):
            if committed.is_dir():
                _discard(committed)


def _move_in(target: Path) -> None:
    committed = target / layout.COMMITTED
    new, old = Manifest.read(committed), _manifest_if_readable(target)
    assert new is not None
    for parent in {(target / name).parent for name in (*new.files, *(old.files if old is not None else ()))}:
        if not parent.resolve().is_relative_to(target.resolve()):
            raise CheckpointError(
                f"{parent} leads out of the checkpoint through a link, and nothing outside it is moved or deleted: "
                "remove the link."
            )
    gone = (old.files if old is not None else {}).keys() - new.files.keys()
    with disk.freed_behind(target / name for name in (*new.files, *gone)):
        for name in new.files:
            if (committed / name).exists():
                disk.make_folder((target / name).parent)
                disk.rename(committed / name, target / name)
        for name in gone:
            disk.remove(target / name)
    # Shards, of a run that was spread otherwise, were in folders of their own.
    emptied = {folder for name in gone for folder in Path(name).parents} - {Path()}
    for folder in sorted(emptied, key=lambda folder: len(folder.parts), reverse=True):
        disk.remove_if_empty(target / folder)
    # Each file is in place before the manifest leaves the folder that says there is something to do.
    for folder in {(target / name).parent for name in new.files}:
        disk.sync_folder(folder)
    disk.rename(committed / layout.MANIFEST, target / layout.MANIFEST)
    disk.sync_folder(target)
    disk.remove_tree(committed)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """A context in which no other process of this machine moves files in a folder. A killed process holds no lock."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # another system, or it is not there
        yield
        return
    try:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise CheckpointError(
                        f"Another process has been replacing the checkpoint in {folder} for {_PATIENCE:.0f} s: check "
                        "whether it was stopped, end it, or choose another folder."
                    ) from None
                time.sleep(0.01)
            except OSError:  # some network disks know no locks
                break
        yield
    finally:
        os.close(descriptor)


def mark(folder: Path) -> tuple[int, ...] | None:
    """What distinguishes the checkpoint in a folder from the next one there; None if it has no manifest."""
    try:
        about = (folder / layout.MANIFEST).stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_ctime_ns


def is_being_replaced(folder: Path) -> bool:
    return (folder / layout.COMMITTED / layout.MANIFEST).exists()


def oldest_first(project_dir: Path) -> list[Path]:
    """The automatically named checkpoints of a project, by when they were saved."""
    return [folder for _, folder in _with_times(project_dir)]


def time_of_saving(target: Path) -> float:
    """The current time, but later than every checkpoint beside `target`: clocks differ, and are set back."""
    beside = _with_times(target.parent.parent) if target.parent.name == layout.CHECKPOINTS else []
    return max([time.time(), *(saved + 0.001 for saved, folder in beside if folder != target)])


def _with_times(project_dir: Path) -> list[tuple[float, Path]]:
    found, last = [], 0.0
    for folder in layout.automatic_folders(project_dir):
        manifest = _manifest_if_readable(folder)
        # Of a 1.x release, or damaged: then its number says which one it came after.
        last = manifest.saved if manifest is not None and manifest.saved else last
        found.append((last, folder))
    return sorted(found, key=lambda entry: entry[0])


def prune(folders: list[Path], keep: int) -> None:
    """Delete all but the last `keep` of these checkpoints."""
    for folder in folders[: max(len(folders) - max(keep, 0), 0)]:
        try:
            _discard(folder)
        except OSError as error:  # the new one is there all the same
            logger.warning(f"{folder} is an older checkpoint than `total_limit` keeps and was not deleted: {error}.")


def _discard(folder: Path) -> None:
    """Delete a folder: it disappears at once by a rename. Of a symbolic link only the link is deleted."""
    if folder.is_symlink():
        disk.remove(folder)
        return
    gone = _beside(folder, layout.DELETING, f"-{_identity()}")
    disk.rename(folder, gone)
    with disk.freed_behind(path for path in gone.rglob("*") if path.is_file()):
        disk.remove_tree(gone)
    if gone.exists():
        disk.remove_tree(gone)  # what was still open has kept a name in it


def _clean(parent: Path, now: float) -> None:
    """Remove the staging folders and half-deleted checkpoints of dead runs. now: by the clock of the disk.

    None of them belongs to this save: what cannot be removed, or is being removed by another run, stays.
    """
    with suppress(OSError):
        for name in os.listdir(parent):  # by names alone: there may be many thousands of others
            mark = _LEFT_BEHIND.search(name)
            if mark is not None and mark.group(1) != _identity():
                with suppress(OSError):
                    _clean_one(parent / name, mark.group(1), now)


def _clean_one(path: Path, identity: str, now: float) -> None:
    if not path.is_dir():
        return
    if not _is_dead(identity, now - path.stat().st_mtime):
        logger.info(f"{path} belongs to a run that may still be alive, so it is kept.")
    elif path.name.startswith(layout.DELETING):
        disk.remove_tree(path)
    else:
        # Renamed first: had its run been asleep, it would find nothing to publish, and never a part of it.
        _discard(path)


def _place() -> str:
    """Within what a process id is unique: the host, since its last boot, and the pid namespace."""
    host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        space = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        boot = space = "0"
    return f"{host}~{boot}~{space}"


def _started(pid: int) -> str:
    """When a process was started, since its id may be reused later."""
    import psutil

    try:
        if psutil.LINUX:  # counted from the start of the machine: the time of day may be set while a run is alive
            state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return "gone" if state in "ZX" else numbers[18]
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return "gone"
        return str(int(process.create_time() * 100))
    except (psutil.Error, OSError):
        return "gone"


def _identity() -> str:
    return f"{_place()}~{os.getpid()}~{_started(os.getpid())}"


def _is_dead(identity: str, silent: float) -> bool:
    """Whether the run with this identity is dead. silent: the seconds since its folder was last touched.

    For runs on this machine that is known at once. A run on another machine or in another container touches its folder
    every minute, and is taken for dead after a day. A run of this host before its last boot is given ten minutes, since
    another machine may have the same name.
    """
    parts = identity.rsplit("~", 4)
    if len(parts) != 5 or not (parts[3].isascii() and parts[3].isdigit()):
        return False
    host, boot, space, pid, started = parts
    my_host, my_boot, my_space = _place().rsplit("~", 2)
    if host == my_host and boot != my_boot:
        return silent > _SILENT_AFTER
    if host == my_host and space == my_space:
        return _started(int(pid)) != started
    return silent > _DEAD_AFTER
