"""The workers of Ray Train run a script as it is: as two processes that anybody else has started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.clusters.test_jobs import as_a_worker_of_ray
from tests.examples.running import EXAMPLES, assert_learned
from tests.harness import world_outcomes


def test_the_job_of_the_examples(tmp_path: Path) -> None:
    ray = version("ray")  # not installed: an error, as this is what is tested
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "home").mkdir()
    env = {**os.environ, "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    # Nothing is told to Ray's makers, and nobody else can reach this cluster, which ends with the program.
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_COLOR_PREFIX": "0"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "jobs/ray_train.py", "--workers", "2"],
        cwd=tmp_path / "examples",
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"ray {ray}\n{done.stdout}\n{done.stderr}"
    learned = [line.partition(") ")[2] for line in done.stdout.splitlines() if "accuracy rose" in line]
    assert learned, done.stdout + done.stderr
    assert_learned(learned[0])
    outcomes = world_outcomes(as_a_worker_of_ray, 2, cwd=tmp_path)
    assert outcomes[0].output.splitlines()[-1] == learned[0], "two processes by other means have learned the same"
