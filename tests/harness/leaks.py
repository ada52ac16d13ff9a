"""What a test may not leave behind: environment variables, a process group, threads, child processes."""

from __future__ import annotations

import contextlib
import multiprocessing.resource_tracker
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness.world import server

# Set for good by other packages when they are first imported or used.
SET_BY_IMPORTS = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "KMP_DUPLICATE_LIB_OK",  # scikit-learn
        "KMP_INIT_AT_FORK",  # scikit-learn
        "TORCHINDUCTOR_CACHE_DIR",  # torch._dynamo
        "TRITON_CACHE_DIR",  # torch._inductor
        "CUDA_MODULE_LOADING",  # a CUDA build of torch, where it looks for a GPU
    }
)
# Threads that live as long as the process by design: tqdm's monitor.
LASTING_THREADS = frozenset({"TMonitor"})
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Snapshot:
    """What exists before a test; `leaks()` says what has been added or changed since."""

    environ: dict[str, str]
    threads: frozenset[int]
    children: frozenset[psutil.Process]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(_environ(), frozenset(id(t) for t in _threads()), frozenset(_children()))

    def leaks(self) -> list[str]:
        """One sentence per leak. Threads and children that are just ending get a moment to do so."""
        found = self._environment_leaks()
        if _process_group_is_up():
            found.append("the process group is still initialized: call destroy_process_group()")
        limit = time.monotonic() + SETTLE_SECONDS
        while (late := self._thread_leaks() + self._child_leaks()) and time.monotonic() < limit:
            time.sleep(0.01)
        return found + late

    def clean_up(self) -> None:
        """Undo what can be undone, so that one leaking test does not fail those after it."""
        for name in _environ().keys() - self.environ.keys():
            del os.environ[name]
        os.environ.update(self.environ)
        if _process_group_is_up():
            sys.modules["torch.distributed"].destroy_process_group()
        leaked = [child for child in _children() if child not in self.children]
        for child in leaked:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(leaked, timeout=5)

    def _environment_leaks(self) -> list[str]:
        before, now = self.environ, _environ()
        found = [f"environment variable {name} was set to {now[name]!r}" for name in sorted(now.keys() - before)]
        found += [f"environment variable {name} was removed" for name in sorted(before.keys() - now)]
        found += [
            f"environment variable {name} was changed from {before[name]!r} to {now[name]!r}"
            for name in sorted(before.keys() & now)
            if before[name] != now[name]
        ]
        return found

    def _thread_leaks(self) -> list[str]:
        return [f"thread {t.name!r} is still running" for t in _threads() if id(t) not in self.threads]

    def _child_leaks(self) -> list[str]:
        return [
            f"child process {child.pid} is still there: {_command(child)}"
            for child in _children()
            if child not in self.children
        ]


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_IMPORTS}


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if type(t).__name__ not in LASTING_THREADS]


def _children() -> list[psutil.Process]:
    """Child processes except the fork server and multiprocessing's tracker, which outlive tests by design."""
    lasting = {server.pid, multiprocessing.resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    return [child for pid in _child_numbers() - lasting for child in _processes(pid)]


def _child_numbers() -> set[int | None]:
    """Of all threads, as the kernel lists them. To ask every process for its parent takes 20 times as long."""
    found: set[int | None] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.update(map(int, listing.read_text().split()))
    return found


def _processes(pid: int | None) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


def _command(child: psutil.Process) -> str:
    try:
        return " ".join(child.cmdline()) or f"<{child.status()}>"
    except psutil.Error:
        return "<gone>"


def _process_group_is_up() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
