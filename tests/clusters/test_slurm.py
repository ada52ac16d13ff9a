"""Scripts started by a real Slurm: by srun directly or through `accelerate launch`, on one node and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import slurm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))

# Each rank writes a file: on a terminal the lines of several ranks may run into one another.
SCRIPT = """
import json, os, sys
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
state = accelerator.state
gathered = accelerator.gather(torch.tensor([state.process_index])).tolist()
told = [state.local_process_index, state.world.local_size, state.world.started_by, state.world.address]
with open(os.path.join(sys.argv[1], str(state.process_index)), "w") as file:
    json.dump([os.environ["SLURMD_NODENAME"], *told, gathered], file)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def slurm_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm") / "lab") as variables:
        yield variables


def run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "SLURM_", "MASTER_")) and name not in ("RANK", "WORLD_SIZE")
    }
    nothing = {"HF_HOME": "/nonexistent"}  # no config file of whoever runs the tests
    environ = {**inherited, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **nothing, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ)


LAUNCH = ["-m", "accelerate.commands.accelerate_cli", "launch"]
# By name: after a step a node is busy for a moment, and Slurm would take the other one.
ON_ONE_NODE = ["-w", "n1", "-N", "1", "-n", "2"]


def ranks(options: list[str], size: int, folder: Path, variables: dict[str, str], *launch: str) -> list[Any]:
    """What each rank of a step says of itself."""
    script, answers = folder / "script.py", folder / "answers"
    script.write_text(SCRIPT)
    answers.mkdir()
    done = run(["srun", *options, sys.executable, *launch, str(script), str(answers)], variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((answers / str(rank)).read_text()) for rank in range(size)]


def test_two_tasks_on_one_node(slurm_variables: dict[str, str], tmp_path: Path) -> None:
    assert ranks(ON_ONE_NODE, 2, tmp_path, slurm_variables) == [
        ["n1", 0, 2, "srun", "127.0.0.1", [0, 1]],
        ["n1", 1, 2, "srun", "127.0.0.1", [0, 1]],
    ]


def test_two_nodes_with_unequal_shares(slurm_variables: dict[str, str], tmp_path: Path) -> None:
    assert ranks(["-N", "2", "-n", "3"], 3, tmp_path, slurm_variables) == [
        ["n1", 0, 2, "srun", "n1", [0, 1, 2]],
        ["n1", 1, 2, "srun", "n1", [0, 1, 2]],
        ["n2", 0, 1, "srun", "n1", [0, 1, 2]],
    ]


HANGING = """
import time
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
if not accelerator.is_main_process:
    time.sleep(1000)
accelerator.gather(torch.ones(1))
"""


def test_a_hang_between_two_nodes_says_who_waits_where(slurm_variables: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANGING)
    watch = {"ACCELERATE_HANG_TIMEOUT": "2", "ACCELERATE_HANG_TIMEOUT_ACTION": "abort"}
    done = run(
        ["srun", "-N", "2", "-n", "2", "-D", str(tmp_path), sys.executable, str(script)], slurm_variables | watch
    )
    assert done.returncode != 0
    assert "rank 0 waits in gather (train.py:8) since" in done.stderr and "; rank 1 runs train.py:7" in done.stderr
    assert "The others wait for rank 1, which has not got there yet." in done.stderr


def test_launch_in_every_task_of_a_node(slurm_variables: dict[str, str], tmp_path: Path) -> None:
    answers = ranks(ON_ONE_NODE, 2, tmp_path, slurm_variables, *LAUNCH)
    assert [(node, local, everyone) for node, local, *_, everyone in answers] == [("n1", 0, [0, 1]), ("n1", 1, [0, 1])]


def test_launch_once_per_node(slurm_variables: dict[str, str], tmp_path: Path) -> None:
    answers = ranks(["-N", "2", "-n", "2"], 2, tmp_path, slurm_variables, *LAUNCH)
    assert [(node, local, everyone) for node, local, *_, everyone in answers] == [("n1", 0, [0, 1]), ("n2", 0, [0, 1])]


def test_a_batch_script_is_one_process_and_its_steps_are_many(slurm_variables: dict[str, str], tmp_path: Path) -> None:
    show = "import os; from accelerate.environments import detect; w = detect(os.environ)"
    (tmp_path / "show.py").write_text(f"{show}; print(w.started_by, w.rank, w.size, w.port)\n")
    show_command = f"{sys.executable} {tmp_path / 'show.py'}"
    job = f"#!/bin/sh\n{show_command}\nsrun -N 1 -n 1 {show_command}\nsrun {show_command}\nsrun {show_command}\n"
    (tmp_path / "job.sh").write_text(job)
    out = tmp_path / "out"
    done = run(["sbatch", "-W", "-N", "2", "-n", "2", "-o", str(out), str(tmp_path / "job.sh")], slurm_variables)
    text = out.read_text()
    assert done.returncode == 0, done.stdout + done.stderr + text
    alone, one_task, *steps = text.split("\n")[:-1]
    assert alone.split()[:3] == ["single", "0", "1"]
    assert one_task.split()[:3] == ["single", "0", "1"]
    first, second = sorted(steps[:2]), sorted(steps[2:])
    for step in (first, second):
        assert [line.split()[:3] for line in step] == [["srun", "0", "2"], ["srun", "1", "2"]]
        assert len({line.split()[3] for line in step}) == 1
    assert first[0].split()[3] != second[0].split()[3], "two steps of a job must not meet at one port"


REQUEUED = """#!/bin/sh
srun {python} -m accelerate launch --cpu --preemption save --resume auto {script} {folder} --signal launcher --workers 1
code=$?
echo "ended with $code" >> {folder}/ends
[ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""


def test_a_job_that_is_told_to_end_is_saved_and_goes_on_when_it_is_requeued(
    slurm_variables: dict[str, str], tmp_path: Path
) -> None:
    script = Path(__file__).parent / "preempted.py"
    (tmp_path / "job.sh").write_text(REQUEUED.format(python=sys.executable, script=script, folder=tmp_path))
    out = tmp_path / "out"
    options = ["--parsable", "--requeue", "--open-mode=append", "-o", str(out), *ON_ONE_NODE]
    done = run(["sbatch", *options, str(tmp_path / "job.sh")], slurm_variables)
    job = done.stdout.strip()
    wait_for(lambda: (tmp_path / "ready").exists(), out)
    run(["scancel", "--signal=TERM", job], slurm_variables)
    wait_for(lambda: (tmp_path / "ends").exists(), out)
    (tmp_path / "ready").unlink()
    wait_for(lambda: (tmp_path / "ends").read_text().count("ended with") == 2, out)
    text = out.read_text()
    assert (tmp_path / "ends").read_text().splitlines() == ["ended with 75", "ended with 0"], text
    assert "SIGTERM on rank" in text and "the run was saved to" in text
    samples = [line for rank in (0, 1) for line in (tmp_path / f"rank{rank}").read_text().splitlines() if "[" in line]
    of_epochs = [line.split(" [")[0] for line in samples if not line.startswith("weights")]
    assert {epoch: of_epochs.count(epoch) for epoch in "0123"} == dict.fromkeys("0123", 20)  # 40 samples, two each


def wait_for(condition: Callable[[], bool], out: Path) -> None:
    limit = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < limit, out.read_text() if out.exists() else "nothing was written"
        time.sleep(0.1)


def test_the_job_file_of_the_examples(slurm_variables: dict[str, str], tmp_path: Path) -> None:
    """Without what this cluster has not got: GPUs, and so many processors."""
    lines = (EXAMPLES / "jobs" / "slurm.sbatch").read_text().splitlines(keepends=True)
    job = "".join(line for line in lines if not line.startswith(("#SBATCH --gpus", "#SBATCH --cpus")))
    (tmp_path / "slurm.sbatch").write_text(job)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    out = tmp_path / "out"
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**slurm_variables, "PATH": search, "ACCELERATE_USE_CPU": "true"}
    done = run(["sbatch", "-W", "-D", str(tmp_path), "-o", str(out), str(tmp_path / "slurm.sbatch")], variables)
    text = out.read_text()
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert "96 steps on 2 process(es); loss fell from" in text, text
