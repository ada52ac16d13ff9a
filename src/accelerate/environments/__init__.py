"""Who started this process: one file per launcher, each a pure function of the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from accelerate.environments import mpi, slurm, torchrun
from accelerate.environments.base import World

__all__ = ["LAUNCHERS", "World", "detect"]

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
