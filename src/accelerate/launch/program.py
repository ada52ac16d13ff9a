"""Runs a program that is not Python, and ends together with its launcher, with all that the program has started.

    python program.py PARENT ./train.sh 1

PARENT is the number of the process to end with; 0 is whatever started it.
Run as a file and imports nothing of the package, so that it costs next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

# What a program that has ended leaves behind is asked to end, and killed after this long.
PATIENCE = 3.0


def adopt_orphans() -> None:
    """Processes below this one whose parent dies become its own, so that none is lost."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prctl(what: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def descendants() -> list[int]:
    """The processes below this one, where the system tells."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        threads = f"/proc/{waiting.pop()}/task"
        with contextlib.suppress(OSError):
            for thread in os.listdir(threads):
                with open(f"{threads}/{thread}/children") as listing:
                    children = [int(word) for word in listing.read().split()]
                found += children
                waiting += children
    return found


def signal_descendants(number: int = signal.SIGKILL) -> None:
    """Sends a signal to everything below this process."""
    for process in descendants():
        with contextlib.suppress(OSError):
            os.kill(process, number)


def run(launcher: int, words: list[str]) -> int:
    """Runs the program, hands signals on to it, and returns how it ended as `subprocess` says it."""
    adopt_orphans()
    # Signals are waited for, not handled, so that none comes at a bad moment.
    heard = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*heard, signal.SIGCHLD})
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _become(words)
    _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    while True:
        if os.getppid() != launcher:
            signal_descendants()
            os._exit(1)
        arrived = signal.sigwaitinfo({*heard, signal.SIGCHLD})
        if arrived.si_signo == signal.SIGCHLD:
            status = _ended(program)
            if status is not None:
                _end_the_rest()
                return os.waitstatus_to_exitcode(status)
        elif arrived.si_code <= 0 and os.getppid() == launcher:  # else the terminal has told the program already
            os.kill(program, arrived.si_signo)


def _become(words: list[str]) -> None:
    _prctl(1, signal.SIGKILL)
    try:
        os.execvp(words[0], words)
    except OSError as problem:
        print(f"{words[0]} cannot be run: {problem.strerror}.", file=sys.stderr, flush=True)
        os._exit(1)


def _ended(program: int | None) -> int | None:
    """Takes note of all that have ended; returns how the program did, if it has."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            status = found[1] if found[0] == program else status
    return status


def _end_the_rest() -> None:
    signal_descendants(signal.SIGTERM)
    end = time.monotonic() + PATIENCE
    while descendants() and time.monotonic() < end:
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
        _ended(None)
    signal_descendants()


def main() -> None:
    launcher, *words = sys.argv[1:]
    if int(launcher) not in (0, os.getppid()):
        sys.exit(1)  # it is gone already
    if sys.platform != "linux":
        os.execvp(words[0], words)
    code = run(os.getppid(), words)
    if code < 0:
        # Ends as the program did, so that whoever waits here learns of the signal.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
