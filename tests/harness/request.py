"""What a test asks of the fork server, and where the answers lie."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Request:
    """One world. `call` holds the pickled function and arguments: only the ranks open it."""

    call: bytes
    processes: int
    timeout: float
    grace: float
    environ: dict[str, str]
    env: dict[str, str | None]
    cwd: str
    folder: str

    def result_path(self, rank: int) -> Path:
        return Path(self.folder, f"{rank}.result")

    def output_path(self, rank: int) -> Path:
        return Path(self.folder, f"{rank}.output")

    def stack_path(self, rank: int) -> Path:
        return Path(self.folder, f"{rank}.stack")


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended, as the server saw it."""

    status: int
    time: float
    timed_out: bool = False
    killed: bool = False


def send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("!Q", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message, or None when the other side is gone."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    (length,) = struct.unpack("!Q", header)
    data = stream.read(length)
    return pickle.loads(data) if len(data) == length else None
