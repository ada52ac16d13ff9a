"""DeepSpeed: on one machine, or where every machine starts its own, torch elastic; else DeepSpeed's own launcher."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate.config.deepspeed import PLUGIN_SETTINGS
from accelerate.config.deepspeed_file import HfDeepSpeedConfig
from accelerate.config.options import option
from accelerate.environments.base import DEFAULT_PORT
from accelerate.launch import hostfile
from accelerate.launch.engines import elastic, single
from accelerate.launch.plan import LaunchEngine, LaunchPlan
from accelerate.launch.settings import Settings
from accelerate.launch.variables import deepspeed_fields

RUNNER = [sys.executable, "-m", "deepspeed.launcher.runner"]


@dataclass(frozen=True)
class Launcher:
    """One way in which DeepSpeed's launcher reaches the other machines.

    program: what it looks for on this machine.
    per_slot: it starts one process for every slot of the hostfile; it can leave none out.
    carries: workers elsewhere know only the variables that a file lists.
    scripts: it runs Python scripts alone, no modules and no programs.
    """

    program: str = ""
    per_slot: bool = False
    carries: bool = True
    scripts: bool = False


LAUNCHERS = {
    "pdsh": Launcher("pdsh"),
    "openmpi": Launcher("ompi_info", per_slot=True),
    "mvapich": Launcher("mpiname", per_slot=True),
    "mpich": Launcher("mpirun", per_slot=True),
    "impi": Launcher("mpirun", per_slot=True),
    "slurm": Launcher("sinfo", carries=False, scripts=True),
    "nossh": Launcher(carries=False),
}


def settle(settings: Settings) -> None:
    """What DeepSpeed's own files say about a launch: the machines of a hostfile, and what must not be said twice."""
    _check_config_file(settings)
    if not _starts_machines(settings):
        _say_what_is_unused(settings)
        return
    hosts = hostfile.read(_hostfile(settings))
    if settings.num_machines is None and len(hosts) == 1:
        return  # it lists this machine
    settings.put("deepspeed_multinode_launcher", *_launcher_in_use(settings))
    hosts = _filtered(settings, hosts)
    _count_machines(settings, hosts)
    settings.hosts = _count_processes(settings, hosts)
    if _in_use(settings).per_slot and settings.main_process_ip is None:
        settings.put("main_process_ip", next(iter(hosts)), "detected", "the first machine of the hostfile")


def own_launcher(settings: Settings) -> list[str]:
    """The words for DeepSpeed's launcher, which starts the machines of a hostfile."""
    hosts, launcher = settings.hosts or {}, _in_use(settings)
    words = ["--hostfile", _hostfile(settings), "--no_local_rank"]
    if settings.starts_all_machines:
        words += ["--launcher", str(settings.deepspeed_multinode_launcher)]
    else:
        words += ["--node_rank", str(settings.machine_rank), "--no_ssh"]
    if len(hosts) == 1:
        words.append("--force_multi")  # that machine need not be this one
    if settings.deepspeed_exclusion_filter is not None:
        words += ["--exclude", str(settings.deepspeed_exclusion_filter)]
    elif settings.deepspeed_inclusion_filter is not None:
        words += ["--include", str(settings.deepspeed_inclusion_filter)]
    elif not launcher.per_slot and len({len(slots) for slots in hosts.values()}) == 1:
        words += ["--num_gpus", str(settings.local_processes)]
    if settings.main_process_ip is not None:
        words += ["--master_addr", str(settings.main_process_ip)]
    words += ["--master_port", str(settings.main_process_port or DEFAULT_PORT)]
    if settings.module:
        words.append("--module")
    elif settings.no_python:
        words.append("--no_python")
    return [*words, settings.script, *settings.script_args]


# --- the machines ---------------------------------------------------------------------------------------------------


def _starts_machines(settings: Settings) -> bool:
    """Whether one of DeepSpeed's own launchers is meant."""
    machines = settings.of["num_machines"]
    if settings.world is not None or settings.mpirun_hostfile is not None or machines.source == "detected":
        return False  # the machines are started already, or by mpirun
    if settings.deepspeed_multinode_launcher == "standard":
        return False
    return settings.deepspeed_hostfile is not None if machines.value is None else bool(machines.value > 1)


def _say_what_is_unused(settings: Settings) -> None:
    for name in ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"):
        if settings.of[name].value is not None:
            settings.notes.append(
                f"`--{name}` is for the machines of a hostfile, which DeepSpeed's own launchers start: here it does "
                "nothing."
            )


def _launcher_in_use(settings: Settings) -> tuple[str, str]:
    given = settings.of["deepspeed_multinode_launcher"]
    return ("pdsh", "default") if given.value is None else (given.value, given.source)


def _in_use(settings: Settings) -> Launcher:
    return LAUNCHERS[str(settings.deepspeed_multinode_launcher)]


def _hostfile(settings: Settings) -> str:
    path = settings.deepspeed_hostfile or (hostfile.USUAL if Path(hostfile.USUAL).is_file() else None)
    if path is None:
        raise ValueError(
            f"DeepSpeed starts {settings.num_machines} machines from a hostfile: give it with `--deepspeed_hostfile`, "
            "or start each machine by hand with `--deepspeed_multinode_launcher standard` and its `--machine_rank`."
        )
    return str(path)


def _filtered(settings: Settings, hosts: hostfile.Hosts) -> hostfile.Hosts:
    include, exclude = settings.deepspeed_inclusion_filter, settings.deepspeed_exclusion_filter
    if include is None and exclude is None:
        return hosts
    if include is not None and exclude is not None:
        raise ValueError(
            "`--deepspeed_inclusion_filter` and `--deepspeed_exclusion_filter` exclude each other: give one of them."
        )
    if _in_use(settings).per_slot:
        raise ValueError(
            f"DeepSpeed's {settings.deepspeed_multinode_launcher} launcher uses every slot of the hostfile: change the "
            "hostfile, and leave out the filter."
        )
    return hostfile.without(hosts, exclude) if include is None else hostfile.included(hosts, include)


def _count_machines(settings: Settings, hosts: hostfile.Hosts) -> None:
    asked, found = settings.num_machines, len(hosts)
    if asked is not None and asked != found:
        _contradicted(settings, f"`--num_machines` is {asked}", f"{_left(settings)} {found} machines")
    settings.put("num_machines", found, "detected", f"they are in {_hostfile(settings)}")


def _count_processes(settings: Settings, hosts: hostfile.Hosts) -> hostfile.Hosts:
    """The slots that are used: as many as there are to be processes, or all of them."""
    asked, slots = settings.num_processes, sum(map(len, hosts.values()))
    if asked is not None and asked > 0 and asked != slots:
        if not _in_use(settings).per_slot and not _has_filter(settings):
            each = range(asked // len(hosts))
            return {name: list(each) for name in hosts}
        found = f"{_left(settings)} {slots} slots, and each gets a process"
        _contradicted(settings, f"`--num_processes` is {asked}", found)
    settings.put("num_processes", slots, "detected", f"one per slot of {_hostfile(settings)}")
    return hosts


def _has_filter(settings: Settings) -> bool:
    return settings.deepspeed_inclusion_filter is not None or settings.deepspeed_exclusion_filter is not None


def _left(settings: Settings) -> str:
    return f"the filter leaves of {_hostfile(settings)}" if _has_filter(settings) else f"{_hostfile(settings)} has"


def _contradicted(settings: Settings, asked: str, found: str) -> None:
    """A filter says exactly what is used, so that a number beside it is at most out of date."""
    if not _has_filter(settings):
        raise ValueError(f"{asked}, but {found}: make them agree.")
    settings.notes.append(f"{asked}, but {found}: the filter is used.")


# --- DeepSpeed's config file ----------------------------------------------------------------------------------------


def _check_config_file(settings: Settings) -> None:
    path = settings.deepspeed_config_file
    if path is None or path == "none":
        return
    try:
        config = HfDeepSpeedConfig(path)
    except ValueError:
        gone = f"There is no file {os.path.abspath(path)}, which `deepspeed_config_file` names: correct the path."
        unread = f"DeepSpeed's config file {path} cannot be read: name one that holds JSON."
        raise ValueError(unread if os.path.exists(path) else gone) from None
    shared = {name: setting for name, setting in PLUGIN_SETTINGS.items() if setting.key is not None}
    twice = [name for name in deepspeed_fields(settings).split(",") if name in shared or name == "mixed_precision"]
    if twice:
        raise ValueError(
            f"{settings.config_file} says {', '.join(twice)}, and so may DeepSpeed's file {path}: leave them to that "
            "file, and write 'auto' there for what the script decides."
        )
    differ = []
    for name, setting in shared.items():
        given, there = settings.of.get(name), config.get_value(str(setting.key))
        if given is None or given.source != "flag" or there is None or there == "auto":
            continue
        if setting.read(option(name).kind.write(given.value)) != there:
            differ.append(f"{setting.key} is {there!r} there, and `--{name}` says {given.value!r}")
    if differ:
        raise ValueError(
            f"DeepSpeed's file {path} and the flags disagree: {'; '.join(differ)}: write 'auto' there, or leave out "
            "the flags."
        )


# --- the plan -------------------------------------------------------------------------------------------------------


def _plan(settings: Settings) -> LaunchPlan:
    if settings.hosts is None:
        return replace(elastic.ENGINE.plan(settings), missing=_missing(settings))
    launcher, env = _in_use(settings), _environment(settings)
    if launcher.scripts and (settings.module or settings.no_python):
        raise ValueError(
            f"DeepSpeed's {settings.deepspeed_multinode_launcher} launcher runs only Python scripts: leave out "
            "`--module` and `--no_python`."
        )
    if launcher.carries:
        _check_carried(env)
    return LaunchPlan(
        _in_words(settings),
        # So that all that DeepSpeed's launcher has started ends with this process.
        single.guarded([*RUNNER, *own_launcher(settings)]),
        env,
        single.command(settings),
        carries=launcher.carries,
        missing=_missing(settings) or _missing_program(settings, launcher),
    )


def _environment(settings: Settings) -> dict[str, str]:
    env = elastic.environment(settings)
    if _in_use(settings).per_slot:
        # MPI tells its processes their ranks, and not where to meet.
        env |= {"MASTER_ADDR": str(settings.main_process_ip)}
        env |= {"MASTER_PORT": str(settings.main_process_port or DEFAULT_PORT)}
    return env


def _check_carried(env: dict[str, str]) -> None:
    """DeepSpeed's launcher puts values into commands of a shell or of mpirun, where others would change."""
    for name, value in env.items():
        if re.search(r"[^\w@%+=:,./-]", value):
            raise ValueError(
                f"{name} is {value!r}, which DeepSpeed's launcher cannot carry to other machines: use only letters, "
                "digits and @%+=:,./-_, or `--deepspeed_multinode_launcher standard`."
            )


def _in_words(settings: Settings) -> str:
    machines = "1 machine" if settings.num_machines == 1 else f"{settings.num_machines} machines"
    launcher = settings.deepspeed_multinode_launcher
    return f"{settings.num_processes} processes on {machines}, by DeepSpeed's {launcher} launcher"


def _missing(settings: Settings) -> str:
    from accelerate.available import is_deepspeed_available

    if settings.no_python or is_deepspeed_available():
        return ""
    return f"DeepSpeed is not installed for {sys.executable}: `pip install deepspeed`, or choose another engine."


def _missing_program(settings: Settings, launcher: Launcher) -> str:
    if not launcher.program or shutil.which(launcher.program) is not None:
        return ""
    return (
        f"DeepSpeed's {settings.deepspeed_multinode_launcher} launcher needs `{launcher.program}`, which is not "
        "installed here: install it, or choose another with `--deepspeed_multinode_launcher`."
    )


# Inside a step of mpirun or srun the processes are there already, and each is one process.
ENGINE = LaunchEngine(matches=lambda settings: bool(settings.use_deepspeed) and settings.world is None, plan=_plan)
