"""Carrying a plan out: from the shell, and from a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from tempfile import TemporaryDirectory
from typing import NoReturn

from accelerate.launch import failure, processes
from accelerate.launch.carry import carried
from accelerate.launch.plan import LaunchPlan


def run(plan: LaunchPlan) -> None:
    """Runs a plan to its end; a failure raises `subprocess.CalledProcessError` with the exit code."""
    code = _supervised(plan)
    if code:
        raise subprocess.CalledProcessError(code, plan.argv)


def run_from_shell(plan: LaunchPlan) -> NoReturn:
    """Runs a plan and ends with its exit code; an engine that can, takes the place of this process."""
    if plan.becomes:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(plan.argv[0], plan.argv, {**os.environ, **plan.env})
    try:
        sys.exit(_supervised(plan))
    except KeyboardInterrupt:
        sys.exit(130)


def _supervised(plan: LaunchPlan) -> int:
    kills = processes.out_of_memory_kills()
    gathering: AbstractContextManager[str | None]
    gathering = TemporaryDirectory(prefix="accelerate-") if plan.gathers else nullcontext()
    carrying: AbstractContextManager[dict[str, str]] = carried(plan.env) if plan.carries else nullcontext({})
    with gathering as folder, carrying as told:
        told = {**told, failure.FOLDER: folder} if folder else told
        returncode = processes.supervise(plan.argv, {**os.environ, **plan.env, **told})
        first = failure.first_in(folder) if folder and returncode else None
    if first is not None and first["py_callstack"]:
        failure.say([first["rank"]], first["host"], first["py_callstack"])
    elif returncode < 0 and -returncode != signal.SIGINT:
        import platform

        words = processes.signal_in_words(-returncode, processes.out_of_memory_kills() - kills)
        print(f"accelerate: the process on {platform.node()} {words}.", file=sys.stderr)
    return processes.exit_code(returncode)
