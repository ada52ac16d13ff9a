"""What a launcher tells a process about the world it is part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class World:
    """Who am I among how many, who started me, and where do we meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    started_by: str = "single"
    reason: str = "no launcher has set RANK, an MPI rank or a Slurm step"

    def variables(self) -> dict[str, str]:
        """The variables that torch's `env://` rendezvous reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def integer(environ: Mapping[str, str], names: Sequence[str], default: int | None = None) -> int | None:
    """The first of `names` that is set, as an integer; a value that is none is named in the error."""
    for name in names:
        value = environ.get(name, "")
        if value == "":
            continue
        try:
            return int(value)
        except ValueError:
            raise ValueError(
                f"The environment variable {name} should be a whole number but is {value!r}: unset or correct it."
            ) from None
    return default
