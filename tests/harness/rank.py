"""What one forked rank does, from the fork to its last breath. Runs in the child and never returns."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import resource
import signal
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.harness.fsdp2_on_cpu import complete_fsdp2
from tests.harness.request import Request
from tests.harness.seeds import seed_rank


def run_rank(request: Request, rank: int, release: int) -> NoReturn:
    """Call the function, leave its result in the world's folder, wait until `release` is closed, and exit."""
    code = 1
    try:
        _settle_in(request, rank)
        report = _call(request)
        _write(request.result_path(rank), report)
        if report["error"] is None:
            # Rank 0 hosts the store that the others may still need: nobody leaves before all are done.
            os.read(release, 1)
            _leave_process_group()
            code = 0
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: the frames below us belong to the server.
        os._exit(code)


def _settle_in(request: Request, rank: int) -> None:
    os.setsid()  # a group of its own, so that its workers can be ended with it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(request.output_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    # SIGABRT, the server's way to say "time is up", prints every thread's stack before it kills.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=open(request.stack_path(rank), "w"), all_threads=True)  # noqa: SIM115

    os.environ.clear()
    os.environ.update(request.environ)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for name, value in request.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(request.cwd)

    seed_rank(rank)
    complete_fsdp2()


def _call(request: Request) -> dict[str, Any]:
    report: dict[str, Any] = {"value": None, "error": None}
    try:
        function, args = pickle.loads(request.call)
        value = function(*args)
        # Plain pickle, not torch's multiprocessing one, which hands out memory that dies with this process.
        report["value"] = pickle.dumps(value)
    except BaseException as error:
        report["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": _traceback(error),
            "time": time.monotonic(),
        }
    return report


def _traceback(error: BaseException) -> str:
    """The traceback without this file's own frame at the top."""
    if error.__traceback__ is not None:
        error = error.with_traceback(error.__traceback__.tb_next or error.__traceback__)
    text = "".join(traceback.format_exception(error)).rstrip()
    return text + _locals(error) if isinstance(error, AssertionError) and not str(error) else text


def _locals(error: BaseException) -> str:
    """The values around a bare `assert`: pytest does not rewrite asserts in a rank."""
    frames = list(traceback.walk_tb(error.__traceback__))
    lines = ["", "where"]
    for name, value in frames[-1][0].f_locals.items():
        with contextlib.suppress(Exception):
            lines.append(textwrap.shorten(f"    {name} = {value!r}", 200))
    return "\n    ".join(lines) if len(lines) > 2 else ""


def _write(path: Path, report: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(report))
    draft.rename(path)  # the server takes the file's existence for "done"


def _leave_process_group() -> None:
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            # Not torch's own function: freeing a group can wait for ever for a thread that waits for Python's lock.
            from accelerate.state.ending import take_down

            take_down(None)
