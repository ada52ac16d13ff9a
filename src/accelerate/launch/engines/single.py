"""One process, started directly; also one of several that mpirun or srun has started."""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate.config.options import variable
from accelerate.environments.base import DEFAULT_PORT
from accelerate.launch.plan import LaunchEngine, LaunchPlan
from accelerate.launch.settings import Settings
from accelerate.launch.variables import variables

WORKER = str(Path(__file__).parents[1] / "worker.py")
PROGRAM = str(Path(__file__).parents[1] / "program.py")


def command(settings: Settings) -> list[str]:
    """What runs the script."""
    words = [] if settings.no_python else [sys.executable, *(["-m"] if settings.module else [])]
    return [*words, settings.script, *settings.script_args]


def through_worker(settings: Settings) -> list[str]:
    """The same by way of worker.py or program.py, which see to it that it ends with whatever starts it."""
    if settings.no_python:
        return guarded([settings.script, *settings.script_args])
    kind = "module" if settings.module else "script"
    return [sys.executable, WORKER, "0", kind, settings.script, *settings.script_args]


def guarded(words: list[str]) -> list[str]:
    """A program that ends, with all that it has started, together with whatever starts it."""
    return [sys.executable, "-I", "-S", PROGRAM, "0", *words]


def environment(settings: Settings) -> dict[str, str]:
    """The variables for processes that are not torch elastic's."""
    env = {variable("cpu"): str(bool(settings.cpu))}
    if settings.world is not None:
        env.update(settings.world.variables())
    elif settings.num_processes > 1:
        env["MASTER_ADDR"] = str(settings.main_process_ip or "127.0.0.1")
        env["MASTER_PORT"] = str(settings.main_process_port or DEFAULT_PORT)
    if settings.cpu:
        # For torch builds on Intel's OpenMP: threads stay where they are, and do not spin for long.
        env["KMP_AFFINITY"] = "granularity=fine,compact,1,0"
        env["KMP_BLOCKTIME"] = "1"
    return {**env, **variables(settings, settings.devices)}


def _plan(settings: Settings) -> LaunchPlan:
    world = settings.world
    engine = (
        "one process" if world is None else f"rank {world.rank} of the {world.size} that {world.started_by} started"
    )
    if settings.no_python:
        return LaunchPlan(engine, through_worker(settings), environment(settings), command(settings))
    return LaunchPlan(engine, command(settings), environment(settings))


ENGINE = LaunchEngine(matches=lambda settings: True, plan=_plan)
