"""The fork server: imports torch once, runs no torch operation, and forks the ranks of one world at a time.

Reads a `Request` from its standard input, answers with the ranks' `Exit`s on its standard output, and ends,
with every rank, when the input closes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import time
import weakref
from typing import IO

from tests.harness.rank import run_rank
from tests.harness.request import Exit, Request, receive, send

# What nearly every world needs; the last one is what the first optimizer of a process imports (two seconds).
PRELOAD = (
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
)
# The engines among them bring in a second's worth of torch each time, were it not for this.
PRELOAD_IF_THERE = (
    "accelerate.accelerator",
    "accelerate.utils",
    "accelerate.strategies.fsdp1",
    "accelerate.strategies.fsdp2",
    "accelerate.strategies.tensor",
    "accelerate.strategies.deepspeed",
    "accelerate.strategies.megatron",
)
POLL_SECONDS = 0.005
STACK_DUMP_SECONDS = 1.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test runner, which then closes our input
    # Keep the channel to ourselves: a stray print must not land in it.
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in PRELOAD:
        importlib.import_module(name)
    for name in PRELOAD_IF_THERE:
        with contextlib.suppress(Exception):  # a broken import is the rank's error to show, not ours
            importlib.import_module(name)
    _settle()

    while (request := receive(requests)) is not None:
        send(answers, World(request, requests, answers).run())


def _settle() -> None:
    """Spare the ranks work on what has been imported here: it is most of what a short world costs."""
    gc.collect()
    gc.freeze()  # none looks through all of it for garbage, and so copies it
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # nor takes torch's libraries apart before it leaves


class World:
    """The processes of one request."""

    def __init__(self, request: Request, requests: IO[bytes], answers: IO[bytes]) -> None:
        self.request = request
        self.channel = (requests, answers)
        self.running: dict[int, int] = {}  # rank -> pid
        self.exits: dict[int, Exit] = {}
        self.release = -1

    def run(self) -> list[Exit]:
        started = time.monotonic()
        wait_end, self.release = os.pipe()
        try:
            for rank in range(self.request.processes):
                self.running[rank] = self._fork(rank, wait_end)
            os.close(wait_end)
            self._watch(deadline=started + self.request.timeout)
        finally:
            self._end_all(signal.SIGKILL)
            self._let_go()
        return [self.exits[rank] for rank in range(self.request.processes)]

    def _fork(self, rank: int, wait_end: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for stream in self.channel:
                stream.close()
            os.close(self.release)
            run_rank(self.request, rank, wait_end)
        return pid

    def _watch(self, deadline: float) -> None:
        while self.running:
            self._collect()
            failures = [exit.time for exit in self.exits.values() if exit.status != 0]
            if failures or all(self._done(rank) for rank in self.running):
                self._let_go()
            now = time.monotonic()
            if failures and now > min(failures) + self.request.grace:
                self._end_all(signal.SIGKILL, killed=True)
            elif now > deadline:
                self._end_all(signal.SIGABRT, timed_out=True)
            # The wait between two looks; input while a world runs can only mean that the test runner is gone.
            if select.select([self.channel[0]], [], [], POLL_SECONDS)[0]:
                return

    def _done(self, rank: int) -> bool:
        return self.request.result_path(rank).exists()

    def _let_go(self) -> None:
        if self.release >= 0:
            os.close(self.release)
            self.release = -1

    def _end_all(self, number: signal.Signals, *, killed: bool = False, timed_out: bool = False) -> None:
        """Send the signal to every rank still running, and make sure that they end."""
        for pid in self.running.values():
            os.kill(pid, number)
        limit = time.monotonic() + STACK_DUMP_SECONDS
        while self.running:
            self._collect(killed=killed, timed_out=timed_out)
            if self.running and time.monotonic() > limit:
                for pid in self.running.values():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _collect(self, *, killed: bool = False, timed_out: bool = False) -> None:
        for rank, pid in list(self.running.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # Before reaping, while the number is still this rank's: end whatever it left in its group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.exits[rank] = Exit(status, time.monotonic(), timed_out=timed_out, killed=killed)
            del self.running[rank]


if __name__ == "__main__":
    main()
