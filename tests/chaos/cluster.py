"""Machines that each keep a launcher running, as a cluster does: one that ends otherwise than well is started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.harness.netns import Machine

TRAIN = Path(__file__).parent / "train.py"
# By this variable every process of a run is known, whoever its parent is.
MARK = "CHAOS_RUN"


class Host:
    """A machine on which `accelerate launch` runs, again and again."""

    def __init__(self, machine: Machine, words: list[str], folder: Path) -> None:
        self.machine = machine
        self.codes: list[int] = []
        self.output = folder / f"output-{machine.name}"
        self._words = words
        self._temporary = folder / f"tmp-{machine.name}"
        self._temporary.mkdir()
        self._mark = str(folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {**os.environ, **self.machine.variables, "HF_HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
        env |= {MARK: self._mark, "TMPDIR": str(self._temporary)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # each of many processes would compile the package again
        command = self.machine.command(sys.executable, "-m", "accelerate", "launch", *self._words)
        with self.output.open("a") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=env, cwd=self._temporary)

    @property
    def launcher(self) -> psutil.Process | None:
        """The launcher, while it runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid)
        return None

    def ended(self) -> int | None:
        """The code with which the launcher has ended, once for each end."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        self.codes.append(code)
        return code

    @property
    def done(self) -> bool:
        return self._process is None and self.codes[-1:] == [0]

    def tend(self) -> None:
        """Starts the launcher again if it has ended otherwise than well."""
        if self.ended() not in (None, 0):
            self.start()

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()


def running(folder: Path) -> list[psutil.Process]:
    """All processes of the run of a folder, wherever they hang."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def workers(host: Host) -> list[psutil.Process]:
    """The ranks of a host."""
    launcher = host.launcher
    if launcher is None:
        return []
    with contextlib.suppress(psutil.Error):
        return [child for child in launcher.children() if "worker.py" in " ".join(child.cmdline())]
    return []


def wait_for(what: str, limit: float, hosts: list[Host], holds: Callable[[], bool]) -> None:
    """Until something holds; an error after so many seconds shows what the launchers have said last."""
    end = time.monotonic() + limit
    while not holds():
        if time.monotonic() > end:
            said = "\n".join(f"--- {host.machine.name}\n{host.output.read_text()[-6000:]}" for host in hosts)
            raise AssertionError(f"after {limit:.0f} s still not: {what}\n{said}")
        time.sleep(0.05)


@contextlib.contextmanager
def ended_afterwards(folder: Path, hosts: list[Host]) -> Iterator[None]:
    """Ends whatever still runs."""
    try:
        yield
    finally:
        for host in hosts:
            host.kill()
        for process in running(folder):
            with contextlib.suppress(psutil.Error):
                process.kill()
