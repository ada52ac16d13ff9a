"""How a checkpoint comes to be on the disk: whole, or not at all.

It grows in a staging folder. A new checkpoint is that folder, renamed. To replace one, the finished staging folder is
renamed to `.accelerate-committed` inside the old one: from that moment the new one counts. Its files are then moved
into place; whoever comes across a half-finished move (a load, the next save) finishes it. Nothing else in the folder
is touched, so it may be anything: the working folder, a mounted disk, a folder with files of the user's own.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path

from accelerate.checkpoint import disk, layout
from accelerate.checkpoint.manifest import Manifest

logger = logging.getLogger(__name__)


def staging_for(target: Path) -> Path:
    """Where a checkpoint for `target` grows: beside it, or inside when it is there already. Named after this run."""
    if target.is_dir():
        return target / f"{layout.STAGING}{_identity()}"
    return target.with_name(f".{target.name}{layout.STAGING}{_identity()}")


def begin(target: Path) -> Path:
    """Clear away what dead runs have left, and make the staging folder."""
    finish_move(target)
    _clean(target if target.is_dir() else target.parent)
    staging = staging_for(target)
    disk.remove_tree(staging)  # of an earlier save of this run, which failed
    disk.make_folder(staging)
    return staging


def publish(staging: Path, target: Path, manifest: Manifest) -> None:
    """Make a finished staging folder the checkpoint."""
    for folder, _, _ in os.walk(staging):
        disk.sync_folder(Path(folder))
    manifest.write(staging)
    disk.sync_folder(staging)
    if staging.parent == target:
        disk.rename(staging, target / layout.COMMITTED)
        disk.sync_folder(target)
        finish_move(target)
    else:
        disk.rename(staging, target)
        disk.sync_folder(target.parent)


def finish_move(target: Path) -> None:
    """Move the files of a committed checkpoint into place; may be called at any time, and again after a crash."""
    committed = target / layout.COMMITTED
    if not committed.is_dir():
        return
    new = Manifest.read(committed)
    if new is not None:
        old = Manifest.read(target)
        for name in new.files:
            if (committed / name).exists():
                disk.make_folder((target / name).parent)
                disk.rename(committed / name, target / name)
        for name in (old.files if old is not None else {}).keys() - new.files.keys():
            disk.remove(target / name)
        # Each file is in place before the manifest leaves the folder that says there is something to do.
        for folder in {(target / name).parent for name in new.files}:
            disk.sync_folder(folder)
        disk.rename(committed / layout.MANIFEST, target / layout.MANIFEST)
        disk.sync_folder(target)
    disk.remove_tree(committed)


def prune(folders: list[Path], keep: int) -> None:
    """Delete all but the last `keep` of these checkpoints: each disappears at once, and is then taken apart."""
    for folder in folders[: max(len(folders) - max(keep, 1), 0)]:
        gone = folder.with_name(f"{layout.DELETING}{folder.name}-{_identity()}")
        disk.rename(folder, gone)
        disk.remove_tree(gone)


def _clean(parent: Path) -> None:
    """Remove the staging folders and half-deleted checkpoints of runs that have ended."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        mark = re.search(rf"(?:{re.escape(layout.STAGING)}|^{re.escape(layout.DELETING)}.*-)([^-]+)$", path.name)
        if mark is None or not path.is_dir():
            continue
        if _is_dead(mark.group(1)):
            disk.remove_tree(path)
        elif mark.group(1) != _identity():
            logger.info(f"{path} belongs to a run that may be alive and is left alone.")


def _place() -> str:
    """This machine since it was started, as far as process numbers mean the same: host, boot and namespace."""
    host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        space = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        boot = space = "0"
    return f"{host}~{boot}~{space}"


def _started(pid: int) -> str:
    """When a process was started: a number may be given to another one later."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return "gone"
        return str(int(process.create_time() * 100))
    except psutil.Error:
        return "gone"


def _identity() -> str:
    return f"{_place()}~{os.getpid()}~{_started(os.getpid())}"


def _is_dead(identity: str) -> bool:
    """Whether the run of that name has ended for sure. Of other machines and containers nothing is known."""
    parts = identity.rsplit("~", 4)
    if len(parts) != 5:
        return False
    host, boot, space, pid, started = parts
    my_host, my_boot, my_space = _place().rsplit("~", 2)
    if host != my_host:
        return False
    if boot != my_boot:
        return True
    return space == my_space and _started(int(pid)) != started
