"""Running commands in tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any


class SubprocessCallException(Exception):
    """A command failed; the message holds what it printed."""


def run_command(
    command: Sequence[Any], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Runs a command, and raises with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True, errors="replace")
    if done.returncode != 0:
        raise SubprocessCallException(
            f"The command `{' '.join(words)}` ended with code {done.returncode}; it printed:\n\n{done.stdout}"
        )
    return done.stdout if return_stdout else None


@dataclass
class RunOutput:
    """How a command ended, and the lines it printed."""

    returncode: int
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


def execute_subprocess_async(
    cmd: Sequence[Any],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Runs a command, showing its lines as they come; raises if it fails or takes too long."""
    words = [str(word) for word in cmd]
    if echo:
        print("\nRunning: ", " ".join(words))
    process = subprocess.Popen(
        words,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = RunOutput(returncode=0)
    readers = [
        threading.Thread(target=_read, args=(process.stdout, output.stdout, None if quiet else sys.stdout, "stdout:")),
        threading.Thread(target=_read, args=(process.stderr, output.stderr, None if quiet else sys.stderr, "stderr:")),
    ]
    for reader in readers:
        reader.start()
    try:
        output.returncode = process.wait(timeout)
    except BaseException as error:
        # With all it started: a launcher's workers would live on, and keep the pipes open.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise RuntimeError(f"`{' '.join(words)}` was ended, because it ran for more than {timeout} seconds.") from None
    finally:
        for reader in readers:
            reader.join()
    if output.returncode != 0:
        errors = "\n".join(output.stderr)
        raise RuntimeError(f"`{' '.join(words)}` ended with code {output.returncode}; its errors:\n{errors}")
    return output


def _read(pipe: IO[str], lines: list[str], screen: IO[str] | None, label: str) -> None:
    with pipe:
        for line in pipe:
            lines.append(line.rstrip("\n"))
            if screen is not None:
                print(label, lines[-1], file=screen)


def pytest_xdist_worker_id() -> int:
    """Returns the number of this worker of pytest-xdist, 0 without it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Returns a port that no other worker of pytest-xdist uses."""
    return 29500 + pytest_xdist_worker_id()
