"""A folder of a launcher for what it and its ranks tell each other, which is gone when it is."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, removed at the end; those of launchers that were killed are removed now."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_prefix()))
    # Under its name it is there only when it is held: what is free is removed by others.
    held = _hold(folder / "new")
    if held is not None:
        (folder / "new").rename(folder / _LOCK)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


def _prefix() -> str:
    """With the name of the machine: of those that share a folder, one need not see what another has locked."""
    return f"accelerate-launch-{socket.gethostname()}@"


def _sweep() -> None:
    """Who made a folder holds a lock in it; the kernel lets go of the lock of a process that is killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{glob.escape(_prefix())}*/{_LOCK}"):
        with suppress(OSError):
            if lock.stat().st_uid == os.getuid() and (held := _hold(lock)) is not None:
                shutil.rmtree(lock.parent, ignore_errors=True)
                os.close(held)


def _hold(lock: Path) -> int | None:
    """Takes a lock; None where somebody has it, or where there are none."""
    try:
        import fcntl
    except ImportError:
        return None
    file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
