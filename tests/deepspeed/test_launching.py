"""DeepSpeed launched on two machines, which are two network namespaces: by hand, by mpirun and by pdsh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import netns
from tests.harness.netns import Machine
from tests.harness.world import free_port

pytest.importorskip("deepspeed", reason="needs deepspeed")
pytestmark = pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--use_deepspeed"]

# Says who it is, once all have met; each machine has an interface of its own.
SCRIPT = """
import json, os, pathlib, socket, sys, time
os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
from accelerate import PartialState
from accelerate.utils import gather_object

state = PartialState()
told = {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "MINE"))}
here = [state.process_index, state.local_process_index, state.num_processes, os.environ["GLOO_SOCKET_IFNAME"]]
everyone = gather_object([(here, told, sys.argv[2:])])
if state.is_main_process:
    pathlib.Path(sys.argv[1]).write_text(json.dumps(everyone))
if "fails" in sys.argv and state.process_index == 3:
    raise ValueError("the third batch is empty")
if "waits" in sys.argv:
    pathlib.Path(f"running-{state.process_index}").write_text(str(os.getpid()))
    time.sleep(1000)
state.destroy_process_group()
"""

# Stands for a login on the machine with that address: options, address, command.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do
  case $1 in -o|-p|-l) shift 2 ;; -l*) shift ;; *) shift ;; esac
done
case $1 in 10.77.0.1) name=NAME1 ;; 10.77.0.2) name=NAME2 ;; *) exit 255 ;; esac
shift
exec env -i PATH="$PATH" HOME="$HOME" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \\
  ip netns exec $name bash -c "$*"
"""


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with netns.two_machines() as pair:
        yield pair


@pytest.fixture
def environ(machines: tuple[Machine, Machine], tmp_path: Path) -> dict[str, str]:
    """Two machines that a login reaches, in a hostfile, with a script."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH.replace("NAME1", machines[0].name).replace("NAME2", machines[1].name))
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("".join(f"{machine.address} slots=2\n" for machine in machines))
    (tmp_path / "script.py").write_text(SCRIPT)
    sources = str(Path(__file__).parents[2] / "src")
    more = {"HF_HOME": "/nonexistent", "OMP_NUM_THREADS": "1", "PYTHONPATH": sources, "MINE": "also"}
    more |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **more}


def start(machine: Machine, environ: dict[str, str], folder: Path, *words: str) -> subprocess.Popen[str]:
    command = machine.command(*LAUNCH, "--main_process_port", str(PORT), *words)
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


PORT = free_port()
FLAGS = ["--zero_stage", "2", "--gradient_accumulation_steps", "4", "--mixed_precision", "bf16"]


def everyone(folder: Path, machines: tuple[Machine, Machine]) -> list[Any]:
    """What each rank has said of itself, where all were told the same."""
    said = json.loads((folder / "said").read_text())
    where = [machines[0].interface] * 2 + [machines[1].interface] * 2
    assert [here for here, _, _ in said] == [[rank, rank % 2, 4, where[rank]] for rank in range(4)]
    for _, told, words in said:
        assert told["ACCELERATE_USE_DEEPSPEED"] == "true"
        assert told["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
        assert told["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
        assert told["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert told["ACCELERATE_USE_CPU"] == "True"
        assert words == ["--lr", "1"]
    return list(said)


def test_each_by_hand(machines: tuple[Machine, Machine], environ: dict[str, str], tmp_path: Path) -> None:
    words = ["--num_machines", "2", "--num_processes", "4", "--main_process_ip", machines[0].address, *FLAGS]
    words += ["--deepspeed_multinode_launcher", "standard"]
    started = [
        start(machine, environ, tmp_path, *words, "--machine_rank", str(rank), "script.py", "said", "--lr", "1")
        for rank, machine in enumerate(machines)
    ]
    for process in started:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    everyone(tmp_path, machines)


@pytest.mark.parametrize("launcher", ["openmpi", "pdsh"])
def test_all_from_one(
    machines: tuple[Machine, Machine], environ: dict[str, str], tmp_path: Path, launcher: str
) -> None:
    needed = {"openmpi": "mpirun", "pdsh": "pdsh"}[launcher]
    if shutil.which(needed) is None:
        pytest.skip(f"needs {needed}")
    (tmp_path / ".deepspeed_env").write_text("MINE_TOO=1\nACCELERATE_MIXED_PRECISION=no\n")
    words = ["--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", launcher, *FLAGS]
    words += ["--main_process_ip", machines[0].address]
    process = start(machines[0], environ, tmp_path, *words, "script.py", "said", "--lr", "1")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    for _, told, _ in everyone(tmp_path, machines):
        assert (told["MINE"], told["MINE_TOO"]) == ("also", "1")
    # The files of the user are as they were, and none was left.
    assert (tmp_path / ".deepspeed_env").read_text() == "MINE_TOO=1\nACCELERATE_MIXED_PRECISION=no\n"


@pytest.fixture
def by_mpirun(machines: tuple[Machine, Machine]) -> list[str]:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun")
    words = ["--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", "openmpi"]
    return [*words, "--main_process_ip", machines[0].address, "script.py", "said"]


def test_a_failure_on_the_other_machine(
    machines: tuple[Machine, Machine], environ: dict[str, str], tmp_path: Path, by_mpirun: list[str]
) -> None:
    process = start(machines[0], environ, tmp_path, *by_mpirun, "fails")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output
    assert "ValueError: the third batch is empty" in output


def test_a_launcher_that_is_killed_leaves_nothing(
    machines: tuple[Machine, Machine], environ: dict[str, str], tmp_path: Path, by_mpirun: list[str]
) -> None:
    process = start(machines[0], environ, tmp_path, *by_mpirun, "waits")
    files = [tmp_path / f"running-{rank}" for rank in range(4)]
    until(lambda: all(file.exists() and file.read_text() for file in files) or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    workers = [int(file.read_text()) for file in files]
    process.kill()
    process.communicate()
    until(lambda: not any(psutil.pid_exists(worker) for worker in workers))


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 150
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.05)
