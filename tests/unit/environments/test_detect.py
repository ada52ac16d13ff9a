"""Who started me, told from a dict."""

from __future__ import annotations

import pytest

from accelerate.environments import World, detect
from accelerate.environments.slurm import expand_hosts

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
INTEL = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_NTASKS": "5",
}


def place(world: World) -> tuple[int, int, int, int]:
    return world.rank, world.size, world.local_rank, world.local_size


@pytest.mark.parametrize("environ", [{}, {"PATH": "/bin", "LOCAL_RANK": "0"}, {"RANK": "1"}, {"WORLD_SIZE": "2"}])
def test_no_launcher(environ: dict[str, str]) -> None:
    world = detect(environ)
    assert place(world) == (0, 1, 0, 1) and world.started_by == "single" and world.reason


def test_torchrun() -> None:
    world = detect(TORCHRUN)
    assert place(world) == (3, 4, 1, 2) and world.started_by == "torchrun"
    assert world.variables() == TORCHRUN
    assert detect(world.variables()) == world


def test_torchrun_without_local_variables_is_one_machine() -> None:
    assert place(detect({"RANK": "2", "WORLD_SIZE": "4"})) == (2, 4, 2, 4)
    assert place(detect({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})) == (3, 4, 1, 2)
    assert place(detect({"RANK": "0", "WORLD_SIZE": "1"})) == (0, 1, 0, 1)


@pytest.mark.parametrize("environ", [OPEN_MPI, INTEL, MVAPICH])
def test_mpi_on_one_machine_needs_no_address(environ: dict[str, str]) -> None:
    world = detect(environ)
    assert place(world) == (1, 2, 1, 2)
    assert (world.started_by, world.address, world.port) == ("mpirun", "127.0.0.1", 29500)


@pytest.mark.parametrize("environ", [OPEN_MPI, INTEL, MVAPICH])
def test_mpi_on_several_machines_needs_an_address(environ: dict[str, str]) -> None:
    size, local_size = list(environ)[1], list(environ)[3]
    spread = {**environ, size: "4", local_size: "2"}
    with pytest.raises(ValueError, match="mpirun -x MASTER_ADDR"):
        detect(spread)
    world = detect({**spread, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"})
    assert place(world) == (1, 4, 1, 2) and (world.address, world.port) == ("10.0.0.1", 77)


def test_mpi_with_one_process_is_single() -> None:
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert detect(environ).started_by == "single"


def test_torchrun_under_mpi_or_slurm_wins() -> None:
    assert detect({**OPEN_MPI, **SLURM, **TORCHRUN}).started_by == "torchrun"


def test_mpirun_inside_a_slurm_job_wins() -> None:
    # mpirun starts its own daemon with srun, one per node: the step's numbers are those of the daemons
    assert place(detect({**SLURM, **OPEN_MPI})) == (1, 2, 1, 2)
    assert place(detect({**SLURM, **INTEL})) == (1, 2, 1, 2)


def test_srun_that_speaks_pmi_is_srun() -> None:
    world = detect({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "5"})
    assert world.started_by == "srun" and world.address == "gpu07" and place(world) == (3, 5, 1, 2)


def test_slurm() -> None:
    world = detect(SLURM)
    assert place(world) == (3, 5, 1, 2) and world.address == "gpu07" and world.started_by == "srun"
    last = detect({**SLURM, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert place(last) == (4, 5, 0, 1)
    assert (last.address, last.port) == (world.address, world.port)


def test_slurm_steps_and_jobs_have_their_own_ports() -> None:
    ports = {
        detect({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in (17, 18)
        for step in (0, 1)
    }
    assert len(ports) == 4 and all(1024 < port < 65536 for port in ports)
    assert 1024 < detect({**SLURM, "SLURM_JOB_ID": "4294901760"}).port < 65536
    assert detect({**SLURM, "MASTER_PORT": "77", "MASTER_ADDR": "head"}).variables()["MASTER_PORT"] == "77"


def test_slurm_on_one_node() -> None:
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_STEP_NODELIST": "gpu07", "SLURM_NODEID": "0"}
    world = detect({**environ, "SLURM_LOCALID": "3"})
    assert place(world) == (3, 5, 3, 5) and world.address == "127.0.0.1"


def test_the_batch_script_itself_stays_single() -> None:
    script = {
        "SLURM_JOB_ID": "17",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NODELIST": "gpu[07-09]",
    }
    assert detect(script).started_by == "single"
    assert detect({**script, "SLURM_STEP_NUM_TASKS": "1"}).started_by == "single"


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("r[1-2]-ib,x-1", ["r1-ib", "r2-ib", "x-1"]),
    ],
)
def test_node_lists(nodelist: str, hosts: list[str]) -> None:
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        (TORCHRUN, "RANK", "one"),
        (TORCHRUN, "WORLD_SIZE", "2.0"),
        (TORCHRUN, "MASTER_PORT", "http"),
        (TORCHRUN, "LOCAL_RANK", "x"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "x"),
        (INTEL, "MPI_LOCALNRANKS", "two"),
        (SLURM, "SLURM_STEP_NUM_TASKS", "5(x1)"),
    ],
)
def test_nonsense_names_the_variable(base: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} should be a whole number but is '"):
        detect({**base, name: value})


@pytest.mark.parametrize("change", [{"RANK": "4"}, {"RANK": "-1"}, {"WORLD_SIZE": "0"}])
def test_a_rank_outside_its_world(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="RANK"):
        detect({**TORCHRUN, **change})


def test_an_empty_variable_counts_as_unset() -> None:
    assert detect({"RANK": "", "WORLD_SIZE": "2"}).started_by == "single"
    assert detect({**TORCHRUN, "LOCAL_RANK": "", "MASTER_PORT": ""}).local_rank == 1
