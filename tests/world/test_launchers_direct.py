"""Real launchers starting a plain script: torchrun, mpirun, srun's variables, processes that form two machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.comm import ops
from accelerate.state import PartialState
from tests.harness import run_world
from tests.harness.world import free_port

SCRIPT = """
import json, os
from accelerate import Accelerator
from accelerate.utils import gather_object
accelerator = Accelerator(cpu=True)
state = accelerator.state
assert accelerator.gather(accelerator.process_index + __import__("torch").zeros(1)).tolist() == [0.0, 1.0]
mine = [state.process_index, state.local_process_index, state.num_processes, state.world.started_by]
everyone = gather_object([mine])
if accelerator.is_main_process:
    print("RESULT", json.dumps([everyone, str(state.distributed_type), os.environ["MASTER_PORT"]]))
accelerator.end_training()
"""


def start(command: list[str], script: Path, **env: str) -> list[Any]:
    script.write_text(SCRIPT)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "OMPI_", "PMI_", "SLURM_")) and name not in ("RANK", "WORLD_SIZE")
    }
    result = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**inherited, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    answer: list[Any] = json.loads(line.removeprefix("RESULT "))
    return answer


def test_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    everyone, kind, _ = start([*launcher, "--master_port", str(free_port())], tmp_path / "x.py")
    assert everyone == [[0, 0, 2, "torchrun"], [1, 1, 2, "torchrun"]]
    assert kind == "DistributedType.MULTI_CPU"


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun, from the package openmpi-bin")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]


@needs_mpirun
def test_mpirun_with_nothing_but_a_number(tmp_path: Path) -> None:
    port = free_port()
    everyone, kind, used = start([*MPIRUN, sys.executable], tmp_path / "x.py", MASTER_PORT=str(port))
    assert everyone == [[0, 0, 2, "mpirun"], [1, 1, 2, "mpirun"]]
    assert kind == "DistributedType.MULTI_CPU" and used == str(port)


def _from_mpi_variables() -> tuple[Any, ...]:
    rank = os.environ.pop("RANK")
    os.environ.update(
        OMPI_COMM_WORLD_RANK=rank,
        OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_LOCAL_RANK=rank,
        OMPI_COMM_WORLD_LOCAL_SIZE="2",
        WORLD_SIZE="7",
        LOCAL_RANK="5",
    )
    state = PartialState()
    return state.world.started_by, state.local_process_index, ops.gather(torch.tensor(int(rank))).tolist()


def test_mpi_beats_a_leftover_world_size() -> None:
    assert run_world(_from_mpi_variables, 2) == [("mpirun", 0, [0, 1]), ("mpirun", 1, [0, 1])]


def _from_slurm_variables() -> tuple[Any, ...]:
    rank = int(os.environ.pop("RANK"))
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_TASKS_PER_NODE="2",
        SLURM_STEP_NODELIST="n1",
        SLURM_NODEID="0",
    )
    state = PartialState()
    assert os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == "2"
    return state.world.started_by, state.process_index, ops.gather(torch.tensor(rank)).tolist()


def test_the_variables_of_srun() -> None:
    assert run_world(_from_slurm_variables, 2) == [("srun", 0, [0, 1]), ("srun", 1, [0, 1])]


def _two_machines(folder: str) -> tuple[Any, ...]:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    state = PartialState()
    ran = []
    state.on_local_main_process(lambda: ran.append("local main"))()
    state.on_main_process(lambda: ran.append("main"))()
    state.on_last_process(lambda: ran.append("last"))()
    state.on_local_process(lambda: ran.append("local 1"), local_process_index=1)()
    mark = Path(folder, f"machine-{rank // 2}")
    with state.local_main_process_first():
        if state.is_local_main_process:
            mark.touch()
        found = mark.exists()
    return state.local_process_index, ran, found


def test_four_ranks_as_two_machines(tmp_path: Path) -> None:
    assert run_world(_two_machines, 4, str(tmp_path)) == [
        (0, ["local main", "main"], True),
        (1, ["local 1"], True),
        (0, ["local main"], True),
        (1, ["last", "local 1"], True),
    ]
