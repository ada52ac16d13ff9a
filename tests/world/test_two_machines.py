"""Two machines, as two network namespaces: they train together, and what each says when the other is gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import netns
from tests.harness.netns import Machine
from tests.harness.world import free_port

pytestmark = pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))

SCRIPT = """
import datetime, pathlib, sys, time
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
limit = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=8))
accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
model = accelerator.prepare(torch.nn.Linear(4, 4))
rank = accelerator.process_index
for step in range(steps):
    accelerator.backward(model(torch.full((2, 4), float(rank))).sum())
    if step == 2:
        (folder / f"running-{rank}").touch()
    if (folder / f"fail-{rank}").exists():
        raise ValueError("the third batch is empty")
    time.sleep(0.02)
grad = accelerator.unwrap_model(model).weight.grad[0].tolist()
print("RESULT", rank, accelerator.local_process_index, accelerator.num_processes, grad, flush=True)
accelerator.end_training()
"""


Start = tuple[list[str], dict[str, str]]  # what comes before the script, and variables


def directly(rank: int, address: str, port: str) -> Start:
    world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [], {**world, "MASTER_ADDR": address, "MASTER_PORT": port}


def launch(rank: int, address: str, port: str) -> Start:
    words = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_machines", "2"]
    words += ["--num_processes", "2", "--machine_rank", str(rank)]
    return [*words, "--main_process_ip", address, "--main_process_port", port], {"HF_HOME": "/nonexistent"}


class Run:
    """The script on both machines."""

    def __init__(
        self, machines: tuple[Machine, Machine], folder: Path, steps: int, start: Callable[..., Start] = directly
    ) -> None:
        self.machines, self.folder = machines, folder
        (folder / "script.py").write_text(SCRIPT)
        words = [str(folder / "script.py"), str(folder), str(steps)]
        port = free_port()
        self.processes = []
        for rank, machine in enumerate(machines):
            launcher, variables = start(rank, machines[0].address, str(port))
            environ = {**os.environ, **machine.variables, **variables, "OMP_NUM_THREADS": "1"}
            with (folder / f"output-{rank}").open("w") as output:
                command = machine.command(sys.executable, *launcher, *words)
                self.processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environ))

    def wait_until_running(self) -> None:
        limit = time.monotonic() + 60
        while not all((self.folder / f"running-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < limit and all(p.poll() is None for p in self.processes), self.output(0)
            time.sleep(0.05)

    def kill(self, rank: int) -> None:
        """End all processes of a machine, as if it had lost its power."""
        process = psutil.Process(self.processes[rank].pid)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def end(self, rank: int) -> tuple[int, str]:
        return self.processes[rank].wait(40), self.output(rank)

    def output(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text()


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with netns.two_machines() as pair:
        yield pair


@contextlib.contextmanager
def running(*args: object, **kwargs: object) -> Iterator[Run]:
    run = Run(*args, **kwargs)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        for rank in (0, 1):
            with contextlib.suppress(psutil.NoSuchProcess):
                run.kill(rank)
            run.processes[rank].wait()


def test_they_train_together(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    with running(machines, tmp_path, steps=4) as run:
        for rank in (0, 1):
            code, output = run.end(rank)
            assert code == 0, output
            # four steps, each with the mean of 2 * 0 and 2 * 1
            assert f"RESULT {rank} 0 2 [4.0, 4.0, 4.0, 4.0]" in output


@pytest.mark.parametrize("gone", [0, 1])
def test_one_is_killed(machines: tuple[Machine, Machine], tmp_path: Path, gone: int) -> None:
    left = 1 - gone
    with running(machines, tmp_path, steps=100_000) as run:
        run.wait_until_running()
        run.kill(gone)
        code, output = run.end(left)
    assert code == 1, output
    assert f"({machines[left].address}) has lost contact with" in output.splitlines()[-1]
    assert f"({machines[gone].address}) (rank {gone})" in output.splitlines()[-1]


def test_one_is_cut_off(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    with running(machines, tmp_path, steps=100_000, start=launch) as run:
        run.wait_until_running()
        machines[1].cut_off()
        ends = [run.end(rank) for rank in (0, 1)]
    for rank, (code, output) in enumerate(ends):
        assert code == 1, output
        last = output.splitlines()[-1]
        assert "has lost contact with" in last and f"({machines[1 - rank].address}) (rank {1 - rank})" in last


def test_the_error_of_one_is_named_on_the_other(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    with running(machines, tmp_path, steps=100_000) as run:
        run.wait_until_running()
        (tmp_path / "fail-1").touch()
        ends = [run.end(rank) for rank in (0, 1)]
    assert [code for code, _ in ends] == [1, 1], ends
    assert "which reads: ValueError: the third batch is empty" in ends[0][1].splitlines()[-1]
    assert f"rank 1 on {os.uname().nodename} ({machines[1].address})" in ends[0][1].splitlines()[-1]
    assert "has lost contact" not in ends[1][1]
