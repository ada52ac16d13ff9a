"""Two machines, as two network namespaces: they train together, and what each says when the other is gone."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import Outcome, netns, world_outcomes
from tests.harness.netns import Machine
from tests.harness.world import free_port

pytestmark = pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))

SCRIPT = """
import datetime, os, pathlib, signal, sys, time
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

folder, steps, event = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limit = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=8))
accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
model = accelerator.prepare(torch.nn.Linear(4, 4))
rank = accelerator.process_index
for step in range(steps):
    accelerator.backward(model(torch.full((2, 4), float(rank))).sum())
    if step == 2:
        (folder / f"running-{rank}").touch()
        if event == f"{rank} is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if event == f"{rank} fails":
            raise ValueError("the third batch is empty")
    time.sleep(0.02)
grad = accelerator.unwrap_model(model).weight.grad[0].tolist()
print("RESULT", rank, accelerator.local_process_index, accelerator.num_processes, grad, flush=True)
accelerator.end_training()
"""


def _script(machines: tuple[Machine, Machine], *words: str) -> None:
    """On a rank: the script, on the machine of the rank; an error ends it as it ends Python."""
    machine = machines[int(os.environ["RANK"])]
    machine.enter()
    os.environ.update(machine.variables, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    sys.argv = list(words)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


def ends(machines: tuple[Machine, Machine], folder: Path, steps: int, event: str = "") -> list[Outcome]:
    """How the script ended on each machine, started by hand."""
    (folder / "script.py").write_text(SCRIPT)
    words = [str(folder / "script.py"), str(folder), str(steps), event]
    env = {"MASTER_ADDR": machines[0].address}
    return world_outcomes(_script, 2, machines, *words, env=env, timeout=100, grace=60)


class Launched:
    """The script, by `accelerate launch` on both machines."""

    def __init__(self, machines: tuple[Machine, Machine], folder: Path) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        words = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_machines", "2"]
        words += ["--num_processes", "2", "--main_process_ip", machines[0].address]
        words += ["--main_process_port", str(free_port())]
        self.processes = []
        for rank, machine in enumerate(machines):
            environ = {**os.environ, **machine.variables, "HF_HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
            script = [str(folder / "script.py"), str(folder), "100000", ""]
            command = machine.command(sys.executable, *words, "--machine_rank", str(rank), *script)
            with (folder / f"output-{rank}").open("w") as output:
                self.processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environ))

    def wait_until_running(self) -> None:
        limit = time.monotonic() + 100
        while not all((self.folder / f"running-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < limit and all(p.poll() is None for p in self.processes), self.output(0)
            time.sleep(0.05)

    def kill(self) -> None:
        for started in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(started.pid)
                for each in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            started.wait()

    def end(self, rank: int) -> tuple[int, str]:
        return self.processes[rank].wait(100), self.output(rank)

    def output(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text()


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with netns.two_machines() as pair:
        yield pair


def test_they_train_together(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    for rank, outcome in enumerate(ends(machines, tmp_path, steps=4)):
        assert outcome.ok, outcome
        # four steps, each with the mean of 2 * 0 and 2 * 1
        assert f"RESULT {rank} 0 2 [4.0, 4.0, 4.0, 4.0]" in outcome.output


@pytest.mark.parametrize("gone", [0, 1])
def test_one_is_killed(machines: tuple[Machine, Machine], tmp_path: Path, gone: int) -> None:
    left = 1 - gone
    outcomes = ends(machines, tmp_path, 100_000, f"{gone} is killed")
    assert outcomes[gone].signal == "SIGKILL" and not outcomes[gone].killed
    assert outcomes[left].exit_code == 1, outcomes[left]
    last = outcomes[left].output.splitlines()[-1]
    assert f"({machines[left].address}) has lost contact with" in last
    assert f"({machines[gone].address}) (rank {gone})" in last


def test_one_is_cut_off(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    run = Launched(machines, tmp_path)
    try:
        run.wait_until_running()
        machines[1].cut_off()
        ended = [run.end(rank) for rank in (0, 1)]
    finally:
        run.kill()
    for rank, (code, output) in enumerate(ended):
        assert code == 1, output
        last = output.splitlines()[-1]
        assert "has lost contact with" in last and f"({machines[1 - rank].address}) (rank {1 - rank})" in last


def test_the_error_of_one_is_named_on_the_other(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    first, second = ends(machines, tmp_path, 100_000, "1 fails")
    assert [first.exit_code, second.exit_code] == [1, 1], (first, second)
    last = first.output.splitlines()[-1]
    assert "which reads: ValueError: the third batch is empty" in last
    assert f"rank 1 on {os.uname().nodename} ({machines[1].address})" in last
    assert "has lost contact" not in second.output
