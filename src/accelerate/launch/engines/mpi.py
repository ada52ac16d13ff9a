"""mpirun, on the machines of a host file: Open MPI, Intel MPI, MVAPICH."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from accelerate.errors import CommandFailed
from accelerate.launch.engines import single
from accelerate.launch.plan import LaunchEngine, LaunchPlan
from accelerate.launch.settings import Settings


@dataclass(frozen=True)
class Flavour:
    """How one MPI spells what we ask of it."""

    name: str
    hostfile: str
    per_machine: str
    bind: tuple[str, ...] = ()

    def pass_on(self, env: dict[str, str]) -> list[str]:
        """The words that carry variables to the other machines; the first machine has them anyway."""
        if self.name == "Open MPI":
            return [word for name in env for word in ("-x", name)]
        return [word for name, value in env.items() for word in ("-genv", name, value)]


OPEN_MPI = Flavour("Open MPI", "--hostfile", "--npernode", ("--bind-to", "socket"))
INTEL_MPI = Flavour("Intel MPI", "-f", "-ppn")
MVAPICH = Flavour("MVAPICH", "-f", "-ppn")


def flavour(version: str) -> Flavour:
    """The MPI that prints this about its version."""
    for name, kind in (("Open MPI", OPEN_MPI), ("Intel", INTEL_MPI), ("HYDRA", MVAPICH), ("MVAPICH", MVAPICH)):
        if name.lower() in version.lower():
            return kind
    raise ValueError(
        f"`mpirun --version` says {version.strip()[:60]!r}, which is none of Open MPI, Intel MPI and MVAPICH: "
        "start the script with that mpirun yourself, it needs no other flag."
    )


def installed() -> Flavour:
    """The MPI of this machine."""
    try:
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        raise CommandFailed(
            "`--mpirun_hostfile` needs `mpirun`, which is not installed here: install Open MPI or Intel MPI."
        ) from None
    return flavour(version)


def command(settings: Settings, kind: Flavour, env: dict[str, str]) -> list[str]:
    """mpirun and its words, then what it runs."""
    return [
        "mpirun",
        *(kind.hostfile, str(settings.mpirun_hostfile)),
        *(kind.per_machine, str(max(1, settings.local_processes))),
        *("-n", str(settings.num_processes)),
        *kind.bind,
        *kind.pass_on(env),
        *single.through_worker(settings),
    ]


def _plan(settings: Settings) -> LaunchPlan:
    if settings.num_machines > 1 and settings.main_process_ip is None:
        raise ValueError(
            f"{settings.num_machines} machines have to meet: give the address of the first with `--main_process_ip`."
        )
    kind = installed()
    env = single.environment(settings)
    engine = f"{settings.num_processes} processes started by {kind.name}"
    return LaunchPlan(engine, command(settings, kind, env), env, single.command(settings), gathers=True)


ENGINE = LaunchEngine(matches=lambda settings: settings.mpirun_hostfile is not None, plan=_plan)
