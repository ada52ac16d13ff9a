"""Who started this process: one file per launcher, each a pure function of the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from accelerate.environments import mpi, slurm, torchrun
from accelerate.environments.base import World, integer

__all__ = ["LAUNCHERS", "World", "detect", "refuse_half_a_world"]

# torchrun first: it is often itself started by mpirun or srun, whose variables are then those of the machine.
LAUNCHERS: tuple[Callable[[Mapping[str, str]], World | None], ...] = (
    torchrun.detect,
    mpi.detect,
    slurm.detect,
)


def detect(environ: Mapping[str, str]) -> World:
    """The world that `environ` describes; a world of one when no launcher has left its mark."""
    for launcher in LAUNCHERS:
        world = launcher(environ)
        if world is not None:
            return world
    return World()


def refuse_half_a_world(environ: Mapping[str, str]) -> None:
    """Raises where `environ` speaks of several processes and nothing says which one this is: each would train alone."""
    size = integer(environ, ["WORLD_SIZE"], 1) or 1
    if size > 1 and detect(environ).size == 1 and integer(environ, ["RANK"]) is None:
        raise ValueError(
            f"WORLD_SIZE is {size}, but RANK is not set, so this process cannot tell which of the {size} it is: start "
            "the script with `accelerate launch` or torchrun, which set both, or unset WORLD_SIZE."
        )
