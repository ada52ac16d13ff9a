"""`make chaos`: a training on two machines of two processes takes faults in a row, and ends as if there had been none.

The machines are network namespaces, so it needs Linux and the rights of an administrator.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos import history
from tests.chaos.cluster import TRAIN, Host, ended_afterwards, running, wait_for
from tests.chaos.faults import FAULTS, Fault, Target
from tests.harness import netns
from tests.harness.netns import Machine

EPOCHS, STEPS, PROCESSES = 10, 300, 4
PORT = 29400  # in namespaces of their own, every port is free
# Steps that the training may be ahead of the next fault.
AHEAD = 6
# From a fault to the first step after it, on a busy machine.
LIMIT = 200.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of faults, of which others are not drawn")
    arguments = parser.parse_args()
    if (missing := netns.missing()) is not None:
        # A failure if somebody could have provided it; not where the kernel has none of this.
        print(f"skipped: {missing}")
        return 1 if netns.can_be_had() is not None else 0
    # Who ends this early finds the machines, their processes and their disk gone.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    names = arguments.only or [fault.__name__ for fault in FAULTS]
    drawn = _drawn([fault for fault in FAULTS if fault.__name__ in names], arguments.faults, arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"in {folder}, which stays there if this fails", flush=True)
    with netns.two_machines() as machines:
        undisturbed = _undisturbed(folder / "undisturbed", machines[0])
        _disturbed(folder / "disturbed", machines, drawn, random.Random(arguments.seed), undisturbed)
    shutil.rmtree(folder)
    return 0


def _undisturbed(folder: Path, machine: Machine) -> history.History:
    """The same training on one machine, without a pause."""
    log = folder / "log"
    log.mkdir(parents=True)
    words = ["--cpu", f"--num_processes={PROCESSES}", str(TRAIN), str(folder / "project"), str(log)]
    host = Host(machine, words, folder)
    with ended_afterwards(folder, [host]):
        host.start()
        wait_for("the undisturbed run has ended", LIMIT, [host], lambda: host.ended() is not None)
    assert host.codes == [0], host.output.read_text()
    seen = history.read(log)
    seen.check_epochs(EPOCHS)
    assert max(step for step, _ in seen.samples) == STEPS
    return seen


def _disturbed(
    folder: Path,
    machines: tuple[Machine, Machine],
    faults: list[Fault],
    draw: random.Random,
    undisturbed: history.History,
) -> None:
    log, project = folder / "log", folder / "project"
    log.mkdir(parents=True)
    words = ["--cpu", "--num_machines=2", f"--num_processes={PROCESSES}", f"--main_process_ip={machines[0].address}"]
    words += [f"--main_process_port={PORT}", "--max_restarts=1000", "--preemption=save", "--resume=auto"]
    words += ["--rdzv_conf=keep_alive_interval=1,read_timeout=15", "--hang_timeout=5"]
    leash = folder / "leash"
    words += [str(TRAIN), str(project), str(log), "--pause=0.04", "--patience=8", f"--leash={leash}"]

    def let_run_to(step: int) -> None:
        """Otherwise a fast training is through before the last fault."""
        draft = folder / "leash-draft"
        draft.write_text(str(step))
        draft.replace(leash)

    let_run_to(AHEAD)
    # A rank that is stopped does not hear that it is to end.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"
    hosts = [Host(machine, words, folder) for machine in machines]

    def wait(seconds: float, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not holds():
            for host in hosts:
                host.tend()
            time.sleep(0.1)

    run = Target(hosts, project, log, draw, wait)
    with _small_disk(project), ended_afterwards(folder, hosts):
        for host in hosts:
            host.start()
        for number, fault in enumerate(faults):
            planned, newest = 5 + number * (STEPS - 20) // len(faults), history.newest_step(log)
            due = max(planned, newest)
            # On a slow machine the training comes to the end of this at each fault: beyond the plan it is short.
            let_run_to(due + (AHEAD if newest <= planned else 2))
            _reach(run, due)
            if run.draw.random() < 0.2:
                run.pause(run.draw.uniform(0, 2))  # wherever it is then
            step, began = history.newest_step(log), time.monotonic()
            assert step < STEPS, f"the training was through before fault {number + 1}"
            said = fault(run)
            print(f"{number + 1}/{len(faults)} at step {step}: {fault.__name__}: {said}", flush=True)
            # A few steps further than what may still have been on its way.
            reached = history.newest_step(log)
            let_run_to(reached + 5)
            _reach(run, min(reached + 4, STEPS - 10))
            starts = history.read(log).starts
            print(f"      {time.monotonic() - began:.0f} s; start {len(starts)} was at {starts[-1][0]}", flush=True)
        let_run_to(STEPS + 1)
        _until(run, "both machines have ended well", lambda: all(host.done for host in hosts))
        wait_for("no process is left", 20, hosts, lambda: not running(folder))
        _check(run, machines, folder, undisturbed)
    print(f"{len(faults)} faults, {len(history.read(log).starts)} starts: as if nothing had happened", flush=True)


def _drawn(faults: list[Fault], number: int, seed: int) -> list[Fault]:
    """Every fault comes about equally often, in any order."""
    draw = random.Random(seed)
    drawn: list[Fault] = []
    while len(drawn) < number:
        drawn += draw.sample(faults, min(len(faults), number - len(drawn)))
    return drawn


def _until(run: Target, what: str, holds: Callable[[], bool]) -> None:
    def tended() -> bool:
        for host in run.hosts:
            host.tend()
        return holds()

    wait_for(what, LIMIT, run.hosts, tended)


def _reach(run: Target, step: int) -> None:
    _until(run, f"the run has come to step {step}", lambda: history.newest_step(run.log) > step)


def _check(run: Target, machines: tuple[Machine, Machine], folder: Path, undisturbed: history.History) -> None:
    seen = history.read(run.log)
    seen.check_epochs(EPOCHS)
    assert seen.samples == undisturbed.samples, "samples of a step are others than in the undisturbed run"
    assert set(seen.weights.values()) == set(undisturbed.weights.values()), (seen.weights, undisturbed.weights)
    assert len(seen.weights) == PROCESSES and len(set(seen.weights.values())) == 1
    for machine in machines:
        assert machine.ports() == set(), f"{machine.name} still listens on {machine.ports()}"
    left = [path.name for path in run.project.iterdir() if path.name != "checkpoints"]
    left += [path.name for path in (run.project / "checkpoints").iterdir() if not path.name[11:].isdigit()]
    left += [path.name for host in folder.glob("tmp-*") for path in host.glob("accelerate-launch-*")]
    left += [path.name for host in folder.glob("tmp-*") for path in host.glob("torchelastic*")]
    assert left == [], f"left behind: {left}"


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=2m") != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount a disk at {folder}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(folder), 2)  # MNT_DETACH


if __name__ == "__main__":
    sys.exit(main())
