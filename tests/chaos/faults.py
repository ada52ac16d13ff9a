"""What can happen to a run: each fault is a function that strikes, and says in words what it did."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos import history
from tests.chaos.cluster import Host, workers

# Longer than the collectives of the training may take, and shorter.
LONG, SHORT = 14.0, 1.5
_MEMORY = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Target:
    """The run that is disturbed. wait: lets so many seconds pass, or until something holds; launchers are tended."""

    hosts: list[Host]
    project: Path
    log: Path
    draw: random.Random
    wait: Callable[[float, Callable[[], bool]], None]

    def rank(self) -> psutil.Process | None:
        ranks = [worker for host in self.hosts for worker in workers(host)]
        return self.draw.choice(ranks) if ranks else None

    def launcher(self) -> psutil.Process | None:
        launchers = [host.launcher for host in self.hosts if host.launcher is not None]
        return self.draw.choice(launchers) if launchers else None

    def pause(self, seconds: float) -> None:
        self.wait(seconds, lambda: False)

    def wait_for_restart(self, seconds: float) -> bool:
        """Whether the run was started again in that time."""
        before = len(history.read(self.log).starts)
        self.wait(seconds, lambda: len(history.read(self.log).starts) > before)
        return len(history.read(self.log).starts) > before


def _send(process: psutil.Process | None, number: signal.Signals) -> str:
    if process is None:
        return "nobody was there"
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return f"process {process.pid} had ended before {number.name}"
    return f"{number.name} to process {process.pid}"


def kill_a_rank(run: Target) -> str:
    return _send(run.rank(), signal.SIGKILL)


def kill_a_launcher(run: Target) -> str:
    return _send(run.launcher(), signal.SIGKILL)


def preempt_a_rank(run: Target) -> str:
    return _send(run.rank(), signal.SIGTERM)


def preempt_a_machine(run: Target) -> str:
    return _send(run.launcher(), signal.SIGTERM)


def stop_a_rank(run: Target) -> str:
    rank, seconds = run.rank(), run.draw.choice([SHORT, LONG])
    said = _send(rank, signal.SIGSTOP)
    run.pause(seconds)
    if rank is not None:
        _send(rank, signal.SIGCONT)
    return f"{said}, and {seconds} s of waiting"


def cut_the_network(run: Target) -> str:
    seconds, machine = run.draw.choice([SHORT, LONG]), run.draw.choice(run.hosts).machine
    machine.cut_off()
    try:
        run.pause(seconds)
    finally:
        machine.mend()
    return f"{machine.name} was cut off for {seconds} s"


def fill_the_disk(run: Target) -> str:
    """Until a save has failed, and the run was started again; or for a minute."""
    filler = run.project / "of-somebody-else"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    restarted = run.wait_for_restart(60)
    filler.unlink()
    until = "until the run was started again" if restarted else "for a minute, in which the run was not started again"
    return f"the disk was full {until}"


def damage_the_newest_checkpoint(run: Target) -> str:
    """And kill a rank, so that the run has to resume."""
    return f"{_damage(run)}; {kill_a_rank(run)}"


def _damage(run: Target) -> str:
    try:
        folders = sorted((run.project / "checkpoints").glob("checkpoint_*"), key=lambda path: path.stat().st_mtime)
        if len(folders) < 2:
            return "nothing was damaged, since there was no checkpoint before the newest"
        files = sorted(path for path in folders[-1].rglob("*") if path.is_file() and path.stat().st_size)
        if not files:
            return f"nothing was damaged, since {folders[-1].name} had no files in this moment"
        file = run.draw.choice(files)
        with file.open("r+b") as opened:
            if run.draw.random() < 0.5:
                how = f"was cut to {file.stat().st_size // 2} bytes"
                opened.truncate(file.stat().st_size // 2)
            else:
                place = run.draw.randrange(file.stat().st_size)
                how = f"has another byte at {place}"
                opened.seek(place)
                byte = opened.read(1)[0]
                opened.seek(place)
                opened.write(bytes([byte ^ 0xFF]))
    except FileNotFoundError:
        return "nothing was damaged, since a checkpoint was pruned in this moment"
    return f"{file.relative_to(run.project)} {how}"


def run_out_of_memory(run: Target) -> str:
    """The kernel kills a rank whose control group has no memory left; where there is no such group, SIGKILL."""
    rank = run.rank()
    if rank is None:
        return "nobody was there"
    group = _MEMORY / f"chaos-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("65536")
        (group / "cgroup.procs").write_text(str(rank.pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        return f"{_send(rank, signal.SIGKILL)}, since no control group can be made ({error.strerror})"
    run.wait(20, lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
    killed = "oom_kill 1" in (group / "memory.oom_control").read_text()
    _send(rank, signal.SIGKILL)
    while True:
        with contextlib.suppress(OSError):
            group.rmdir()
            break
        time.sleep(0.05)
    return f"process {rank.pid} {'was killed by the kernel' if killed else 'needed no memory, and got SIGKILL'}"


Fault = Callable[[Target], str]
FAULTS: tuple[Fault, ...] = (
    kill_a_rank,
    kill_a_launcher,
    preempt_a_rank,
    preempt_a_machine,
    stop_a_rank,
    cut_the_network,
    fill_the_disk,
    damage_the_newest_checkpoint,
    run_out_of_memory,
)
