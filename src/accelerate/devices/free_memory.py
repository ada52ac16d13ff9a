"""How much host memory this process can still allocate."""

from __future__ import annotations

import math
from pathlib import Path

import psutil


def free_host_memory() -> int:
    """Bytes that this process can still allocate: what is free, and what its control groups (containers) allow."""
    return int(max(0, min(psutil.virtual_memory().available, _room_in_control_groups())))


# The files of a control group: its limit, what is taken, and what of that are pages of files, which can be freed: those
# of shared memory cannot, and are in other lists.
_UNIFIED = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_SEPARATE = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def _room_in_control_groups(system: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Infinite where there is no limit."""
    room = math.inf
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:  # only Linux has them
        return room
    for _, controllers, path in groups:
        if controllers and "memory" not in controllers.split(","):
            continue
        top, files = (system / "memory", _SEPARATE) if controllers else (system, _UNIFIED)
        # A group is also bound by those that it is in. In a container its own path may be that of outside.
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            room = min(room, _room_in(group, *files))
            if group == top:
                break
    return room


def _room_in(group: Path, limit: str, taken: str, freeable: tuple[str, str]) -> float:
    try:
        words = (group / "memory.stat").read_text().split()
        pages_of_files = sum(int(words[words.index(name) + 1]) for name in freeable)
        return int((group / limit).read_text()) - int((group / taken).read_text()) + pages_of_files
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return math.inf
