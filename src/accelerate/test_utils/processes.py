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
    """Raised when a command failed; the message has what it printed."""


def run_command(
    command: Sequence[Any], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command.

    Args:
        command: the words of the command.
        return_stdout: return what it printed.
        env: its environment. By default that of this process.

    Raises:
        SubprocessCallException: the command failed.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True, errors="replace")
    if done.returncode != 0:
        raise SubprocessCallException(
            f"The command `{' '.join(words)}` ended with code {done.returncode}; it printed:\n\n{done.stdout}"
        )
    return done.stdout if return_stdout else None


@dataclass
class RunOutput:
    """Exit code and lines of a command."""

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
    """Run a command, and show its lines as they come.

    Args:
        cmd: the words of the command.
        env: its environment. By default that of this process.
        stdin: its standard input, as in `subprocess.Popen`.
        timeout: how many seconds it may take.
        quiet: do not show its lines.
        echo: print the command first.

    Returns:
        Its exit code and lines.

    Raises:
        RuntimeError: the command failed, or took too long.
    """
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
    """Return the number of this pytest-xdist worker, 0 without pytest-xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port that no other pytest-xdist worker uses."""
    return 29500 + pytest_xdist_worker_id()
