"""The job files: as what starts them would start them, with the variables that it sets."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from tests.examples.running import EXAMPLES, assert_learned
from tests.harness import world_outcomes
from tests.harness.world import free_port

JOBS = EXAMPLES / "jobs"
CLUSTERS = EXAMPLES.parent / "docs" / "clusters.md"


def documents(name: str) -> dict[str, Any]:
    """The parts of a job file, by their kind."""
    return {part["kind"]: part for part in yaml.safe_load_all((JOBS / name).read_text())}


def start(container: dict[str, Any], folder: Path, **variables: str) -> subprocess.Popen[str]:
    """What a pod does, in a folder that holds the examples, on a machine without GPUs."""
    (folder / "examples").unlink(missing_ok=True)
    (folder / "examples").symlink_to(EXAMPLES)
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": search, "HF_HOME": str(folder), "OMP_NUM_THREADS": "1", **variables}
    env |= {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [*container["command"], *container["args"]],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_job_file_that_the_documents_show_is_that_of_the_examples() -> None:
    assert (JOBS / "slurm.sbatch").read_text() in (EXAMPLES.parent / "docs" / "preemption.md").read_text()


def assert_trained_together(pods: list[subprocess.Popen[str]]) -> None:
    """On two machines of one process each."""
    try:
        outputs = [pod.communicate(timeout=200) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    first, second = (lines.splitlines() for lines, _ in outputs)
    assert first == second, "each machine prints, and they have trained one model"
    assert first[0] == "training on 2 process(es), device cpu" and "accuracy on 359 digits" in first[1]


def test_the_pods_of_a_pytorchjob_train_together(tmp_path: Path) -> None:
    replicas = documents("kubernetes_pytorchjob.yaml")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert [(kind, replica["replicas"]) for kind, replica in replicas.items()] == [("Master", 1), ("Worker", 1)]
    port = str(free_port())
    pods = []
    for rank, replica in enumerate(replicas.values()):
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        folder = tmp_path / str(rank)
        folder.mkdir()
        # As the training operator sets them, for pods of one process each.
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
        own |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        own |= {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1"}
        pods.append(start(container, folder, **own))
    assert_trained_together(pods)


def test_the_pods_of_a_jobset_train_together(tmp_path: Path) -> None:
    (replicated,) = documents("kubernetes_jobset.yaml")["JobSet"]["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["completionMode"], job["completions"]) == (1, "Indexed", 2)
    (container,) = job["template"]["spec"]["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert env == {"MASTER_ADDR": f"train-{replicated['name']}-0-0.train", "MASTER_PORT": "29500", "GPUS": "4"}
    # Without names of pods, and without GPUs.
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GPUS": "1"}
    pods = []
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        pods.append(start(container, tmp_path / str(index), **env, JOB_COMPLETION_INDEX=str(index)))
    assert_trained_together(pods)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun, from the package openmpi-bin")
def test_mpirun_starts_the_training(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = {"command": ["bash"], "args": ["examples/jobs/mpirun.sh"]}
    own = {"PROCESSES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    run = start(words, tmp_path, **own)
    printed, errors = run.communicate(timeout=200)
    assert run.returncode == 0, printed + errors
    assert "training on 2 process(es), device cpu" in printed and "accuracy on 359 digits" in printed


@pytest.mark.parametrize("name", sorted(path.name for path in JOBS.glob("*.*")))
def test_the_document_shows_the_job_files_as_they_are(name: str) -> None:
    text = (JOBS / name).read_text()
    blocks = re.findall(r"^```.*\n((?:.*\n)*?)```$", CLUSTERS.read_text(), flags=re.MULTILINE)
    assert blocks.count(text) == 1, f"docs/clusters.md should show examples/jobs/{name} word for word"


def test_the_pods_of_a_job_would_be_two_machines(tmp_path: Path) -> None:
    parts = documents("kubernetes_job.yaml")
    job = parts["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    # The first pod is called after the job, and found through the service.
    assert parts["Service"]["metadata"]["name"] == job["template"]["spec"]["subdomain"] == "train"
    assert parts["Service"]["spec"]["selector"]["job-name"] == parts["Job"]["metadata"]["name"] == "train"
    container["args"] = [container["args"][0].replace("accelerate launch", "accelerate launch --dry_run")]
    shown, errors = start(container, tmp_path, JOB_COMPLETION_INDEX="1").communicate(timeout=100)
    assert "4 processes on each of 2 machines" in shown, shown + errors
    assert "--node_rank=1" in shown and "--rdzv_endpoint=train-0.train:29500" in shown
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)


def as_a_worker_of_ray() -> None:
    """On a rank: the training function, after what Ray Train does before it."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    dist.init_process_group("gloo")
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(JOBS / "ray_train.py"))["train"]({"epochs": 2})


def test_ray_starts_the_training(tmp_path: Path) -> None:
    entrypoint = documents("ray_job.yaml")["RayJob"]["spec"]["entrypoint"]
    assert "cd /workspace/examples && python jobs/ray_train.py" in entrypoint
    outcomes = world_outcomes(as_a_worker_of_ray, 2, cwd=tmp_path)
    assert [outcome.reason for outcome in outcomes] == ["finished"] * 2, outcomes[0].traceback
    assert_learned(outcomes[0].output.splitlines()[-1])
