"""How much memory a call takes at most, whatever the settings of the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_CLEAR = Path("/proc/self/clear_refs")

needs_peak = pytest.mark.skipif(not _CLEAR.exists(), reason="Linux tells the most memory there was")


def peak(function: Callable[[], Any]) -> int:
    """By how many bytes the memory of this process grows at most during a call. For a process of its own."""
    _return_what_is_freed()
    _CLEAR.write_text("5")  # forget the most there was
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _return_what_is_freed() -> None:
    """No huge pages, one arena, and a mapping of its own for each tensor: free memory is then not resident."""
    libc = ctypes.CDLL(None)
    libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
    libc.mallopt(-8, 1)  # M_ARENA_MAX
    libc.mallopt(-3, 128 * 1024)  # M_MMAP_THRESHOLD, which grows by itself otherwise
    libc.malloc_trim(0)


def _status(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024
