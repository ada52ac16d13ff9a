"""Processes that end together, and how one ended, in words."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

# After Ctrl-C a run has this long to end by itself.
GRACE = 4.0


def tie_to(parent: int) -> Callable[[], None] | None:
    """For a new child: lets the kernel kill it when its parent is gone. Called between fork and exec."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return tie


def supervise(argv: list[str], env: Mapping[str, str]) -> int:
    """Runs a command to its end, hands signals on to it, and returns how it ended as `subprocess` says it.

    Ctrl-C raises KeyboardInterrupt when the command has ended, unless it took it calmly and ended with 0.
    """
    child = subprocess.Popen(argv, env=dict(env), preexec_fn=tie_to(os.getpid()))
    stop = _Stop(child)
    before = stop.install()
    try:
        code = child.wait()
        if code and stop.limit is not None:
            raise KeyboardInterrupt
        return code
    finally:
        if stop.limit is not None:
            stop.limit.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.kill()
            child.wait()


class _Stop:
    """What happens to a child when its launcher gets a signal."""

    FORWARDED = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGINT")

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self.limit: threading.Timer | None = None

    def install(self) -> dict[int, Any]:
        before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return before  # signals are the main thread's business
        for name in self.FORWARDED:
            number = getattr(signal, name, None)
            # None: C code handles this signal, and Python could not give it back its handler.
            if number is not None and signal.getsignal(number) is not None:
                before[number] = signal.signal(number, self.on_signal)
        return before

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.limit is None:
            # A little longer than what a child that is a launcher itself gives to its own.
            self.limit = threading.Timer(GRACE + 0.5, self.child.kill)
            self.limit.daemon = True
            self.limit.start()
        if number == signal.SIGINT and _from_terminal():
            return  # the terminal has told the child already
        self.child.send_signal(number)


def _from_terminal() -> bool:
    """Whether Ctrl-C reaches all processes of this group by itself."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def out_of_memory_kills() -> int:
    """How often the kernel has killed for memory in this control group, as far as it tells."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            words = Path(path).read_text().split()
        except OSError:
            continue
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return 0


_SIGNALS = {
    "SIGSEGV": "a library accessed invalid memory; `PYTHONFAULTHANDLER=1` shows where",
    "SIGBUS": "most often shared memory ran out: enlarge /dev/shm, or use fewer data loader workers",
    "SIGABRT": "a library aborted; its last message is above",
    "SIGILL": "it was built for another processor",
    "SIGFPE": "a library divided by zero",
    "SIGTERM": "something asked it to end",
    "SIGINT": "it was interrupted",
    "SIGHUP": "its terminal was closed",
}
_MEMORY = "try a smaller batch, fewer data loader workers, or spread the model (FSDP, offloading)"


def signal_in_words(number: int, memory_kills: int = 0) -> str:
    """What a signal that ended a process means, and what to try."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"was ended by signal {number}"
    if name == "SIGKILL":
        if memory_kills:
            return f"was killed by the kernel because memory ran out (SIGKILL): {_MEMORY}"
        return f"was killed (SIGKILL), most often by the kernel because memory ran out: {_MEMORY}"
    return f"was ended by {name}: {_SIGNALS.get(name, 'nothing here sends it')}"


def exit_code(returncode: int) -> int:
    """The code a shell shows for a process that ended so."""
    return 128 - returncode if returncode < 0 else returncode
