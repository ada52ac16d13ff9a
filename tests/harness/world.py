"""`run_world` and `world_outcomes`: the two functions tests call, and the client side of the fork server."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.request import Exit, Request, receive, send

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
# Which of pytest-xdist's workers this is, and how many there are.
WORKER = (
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")),
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)


# What torch itself says: the greetings of gloo in 2.9, and that a machine of a test has no name, in 2.6.
_OF_TORCH = r"^(\[Gloo\] Rank |.*\[c10d\] The hostname of the client socket cannot be retrieved).*\n?"


class WorldFailed(AssertionError):
    """A rank failed, died or hung; the message holds its traceback and output."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a `value`, with an `error` (its type's name), or by a `signal`."""

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    traceback: str = ""
    signal: str | None = None
    exit_code: int = 0
    timed_out: bool = False
    killed: bool = False  # by the harness, because another rank had failed
    output: str = ""
    ended: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None and self.signal is None and self.exit_code == 0

    @property
    def reason(self) -> str:
        """One line."""
        if self.error is not None:
            return f"{self.error}: {self.message}".strip().splitlines()[0]
        if self.timed_out:
            return "still running when the time was up"
        if self.killed:
            return "ended by the harness, after another rank had failed"
        if self.signal is not None:
            return f"died of {self.signal}"
        return f"exited with code {self.exit_code}" if self.exit_code else "finished"


def run_world(
    function: Callable[..., Any],
    processes: int = 2,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call a module-level function on every rank of a new world and return the results in rank order.

    Ranks see what torchrun would set, on CPU; `env` adds variables, or removes those whose value is None.
    They run in a temporary folder unless `cwd` names one. A failing rank raises `WorldFailed` here.
    """
    __tracebackhide__ = True
    outcomes = world_outcomes(function, processes, *args, timeout=timeout, env=env, cwd=cwd)
    if not all(outcome.ok for outcome in outcomes):
        raise WorldFailed(_explain(outcomes, timeout))
    return [outcome.value for outcome in outcomes]


def world_outcomes(
    function: Callable[..., Any],
    processes: int = 2,
    *args: Any,
    timeout: float = 60.0,
    grace: float = 20.0,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> list[Outcome]:
    """Like `run_world`, for tests that want ranks to fail: returns how each one ended, raises nothing.

    Once a rank has failed, the others have `grace` seconds to end by themselves.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        work = Path(cwd) if cwd is not None else Path(folder, "work")
        work.mkdir(exist_ok=True)
        request = Request(
            call=_pickled(function, args),
            processes=processes,
            timeout=timeout,
            grace=grace,
            environ={**os.environ, **_world_variables(processes)},
            env=dict(env or {}),
            cwd=str(work),
            folder=folder,
        )
        exits = server.ask(request)
        return [_outcome(request, rank, exit) for rank, exit in enumerate(exits)]


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", function)
        raise TypeError(
            f"{name} cannot travel to another process ({error}): "
            "use a function defined at the top of a module, and arguments that pickle."
        ) from None


def _world_variables(processes: int) -> dict[str, str]:
    variables = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's own name need not resolve
    return variables


def free_port() -> int:
    """A port nobody listens on: not torch's own, 29500, and none that the system may give to whoever asks for any.

    Where several workers run tests, no two of them get the same one while nobody listens there yet.
    """
    choose = random.SystemRandom()
    worker, workers = WORKER
    while True:
        port = choose.randrange(20000 + worker, 29000, workers)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _outcome(request: Request, rank: int, exit: Exit) -> Outcome:
    output = re.sub(_OF_TORCH, "", _text(request.output_path(rank)), flags=re.MULTILINE).rstrip()
    result = request.result_path(rank)
    report = pickle.loads(result.read_bytes()) if result.exists() else {"value": None, "error": None}
    if (error := report["error"]) is not None:
        return Outcome(
            rank,
            error=error["type"],
            message=error["message"],
            traceback=error["traceback"],
            exit_code=exit.status,
            output=output,
            ended=error["time"],
        )
    return Outcome(
        rank,
        value=pickle.loads(report["value"]) if report["value"] is not None else None,
        # faulthandler ends with a long list of extension modules that helps nobody here
        traceback=_text(request.stack_path(rank)).partition("\nExtension modules:")[0].rstrip(),
        signal=signal.Signals(-exit.status).name if exit.status < 0 else None,
        exit_code=max(exit.status, 0),
        timed_out=exit.timed_out,
        killed=exit.killed,
        output=output,
        ended=exit.time,
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace").rstrip() if path.exists() else ""


def _explain(outcomes: list[Outcome], timeout: float) -> str:
    """The rank that failed first in full, the others in one line each; every stack if time was up."""
    failed = sorted((o for o in outcomes if not o.ok), key=_order_of_blame)
    first, others = failed[0], failed[1:]
    if first.timed_out:
        parts = [f"the world did not finish within {timeout:g} seconds"]
        parts += [f"rank {o.rank}: {o.reason}\n{o.traceback}" for o in failed]
        parts += [f"rank {o.rank}: {o.reason}" for o in outcomes if o.ok]
    else:
        parts = [f"rank {first.rank}: {first.traceback or first.reason}"]
        if first.error is None and first.traceback:
            parts[0] = f"rank {first.rank}: {first.reason}\n{first.traceback}"
        parts += [f"rank {o.rank}: {o.reason}" for o in others]
    parts += [f"--- output of rank {o.rank} ---\n{o.output}" for o in outcomes if o.output]
    return "\n".join(parts)


def _order_of_blame(outcome: Outcome) -> tuple[bool, bool, float, int]:
    ended = 0.0 if outcome.timed_out else outcome.ended
    return outcome.timed_out, outcome.killed, ended, outcome.rank


class Server:
    """The fork server's process, started by the first world and ended with the test session."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def ask(self, request: Request) -> list[Exit]:
        """Have a world run. Whatever goes wrong on the way ends the server, and with it the world."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, request)
            limit = START_SECONDS + request.timeout + request.grace
            ready, _, _ = select.select([process.stdout], [], [], limit)
            exits = receive(process.stdout) if ready else None
        except BaseException:
            self.stop()
            raise
        if exits is None:
            code = self.stop()
            raise WorldFailed(f"the fork server gave no answer (exit code {code}); its errors are on stderr")
        return exits

    def _started(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is not None:
            self.stop()
        if self.process is None:
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from tests.harness.server import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=environ,
            )
        return self.process

    def stop(self) -> int | None:
        """End the server and its ranks; returns its exit code, None if there was none."""
        process, self.process = self.process, None
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            return process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            process.stdout.close()


server = Server()
