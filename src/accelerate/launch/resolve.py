"""From parsed arguments to all settings: what nobody says is found out from the cluster and the machine."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from accelerate import environments
from accelerate.config.options import FAMILIES, variable
from accelerate.config.options.launching import RENDEZVOUS
from accelerate.environments.base import DEFAULT_PORT
from accelerate.launch import machine
from accelerate.launch.settings import Settings, read_file, read_flags


def resolve(
    args: argparse.Namespace,
    environ: Mapping[str, str] | None = None,
    devices: machine.Accelerators | None = None,
    port_in_use: Callable[[int], bool] | None = None,
) -> Settings:
    """Flags before the file, the file before what is detected, that before defaults."""
    environ = os.environ if environ is None else environ
    settings = Settings(str(args.training_script), [str(word) for word in args.training_script_args])
    read_flags(settings, args)
    read_file(settings, environ)
    settings.devices = machine.accelerators(environ) if devices is None else devices
    for detect in _DETECTED:
        detect(settings, environ)
    _port(settings, port_in_use)
    return settings


def _engine(settings: Settings, environ: Mapping[str, str]) -> None:
    file = settings.file
    if not settings.use_parallelism_config and getattr(file, "parallelism_config", None):
        settings.put("use_parallelism_config", True, "file", "it has a `parallelism_config`")
    engine = settings.use_fsdp or settings.use_deepspeed
    if settings.of["use_parallelism_config"].source == "flag" and not engine:
        raise ValueError(
            "`--use_parallelism_config` spreads a model with FSDP, or sequences with DeepSpeed: add `--use_fsdp "
            "--fsdp_version 2`, or `--use_deepspeed`."
        )


def _without_effect(settings: Settings, environ: Mapping[str, str]) -> None:
    """Flags of an engine that was not asked for: a person may take them for what asks for it."""
    for family in FAMILIES:
        if not family.switch or settings.of[family.switch].value:
            continue
        given = [f"`--{option.name}`" for option in family.options if settings.of[option.name].source == "flag"]
        if given:
            verb = "have" if len(given) > 1 else "has"
            settings.notes.append(f"{', '.join(given)} {verb} no effect without `--{family.switch}`.")


def _tpu(settings: Settings, environ: Mapping[str, str]) -> None:
    """The chips of this machine, and the pod that it is part of."""
    if settings.use_fsdp and settings.fsdp_xla == "true" and not settings.tpu:
        settings.put("tpu", True, settings.of["fsdp_xla"].source, "FSDP is to shard over the chips of a TPU")
    if settings.of["tpu_use_cluster"].source == "flag" and settings.tpu_use_cluster:
        settings.put("tpu", True, "flag", "`--tpu_cluster` was given")
    if settings.use_fsdp and settings.tpu and settings.fsdp_xla_fsdp_v2 == "false":
        raise ValueError("FSDP on a TPU works only by SPMD: leave out `--fsdp_xla_fsdp_v2 no`.")
    if settings.tpu:
        from accelerate.launch import tpu

        tpu.settle(settings, environ)
    if settings.of["tpu_env"].source == "flag" and not settings.tpu_use_cluster:
        settings.notes.append(
            "`--env` has no effect without `--tpu_cluster`: set variables before the command, as in "
            f"`{' '.join(map(str, settings.tpu_env))} accelerate launch ...`."
        )


def _flags_of_the_script(settings: Settings, environ: Mapping[str, str]) -> None:
    """Flags after the script are the script's. Some are hardly ever meant for one, unless they come after a `--`."""
    ours = {f"--{name}" for name in ("multi_gpu", "num_processes", "num_machines", "machine_rank", "main_process_ip")}
    words = itertools.takewhile(lambda word: word != "--", settings.script_args)
    given = [word for word in map(_with_underscores, words) if word in ours]
    if given:
        settings.notes.append(
            f"`{given[0]}` comes after {settings.script} and goes to the script: put it before, if it is for the "
            "launch."
        )


def _with_underscores(word: str) -> str:
    return "--" + word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else word


def _precision(settings: Settings, environ: Mapping[str, str]) -> None:
    for name in ("mixed_precision", "dynamo_backend"):
        if getattr(settings, name) is None:
            settings.put(name, "no", "default")
        found, said = settings.of[name], environ.get(variable(name))
        if said and found.source != "flag" and said.lower() != str(found.value).lower():
            what = "its default" if found.source == "default" else f"that of {settings.config_file},"
            settings.notes.append(
                f"{variable(name)} is {said!r} here, and a launch replaces it by {what} {str(found.value)!r}: give "
                f"`--{name} {said}`."
            )


def _cluster(settings: Settings, environ: Mapping[str, str]) -> None:
    """Inside a step of mpirun or srun, the processes are there already; or one per node is, to start the others."""
    if settings.mpirun_hostfile is not None or any(
        settings.of[name].source == "flag" for name in ("num_machines", "machine_rank", "main_process_ip")
    ):
        return
    world = environments.detect(environ)
    if world.started_by not in ("mpirun", "srun"):
        return
    one_per_node = world.started_by == "srun" and world.local_size == 1
    per_node = _processes_per_node(settings, world.size) if one_per_node else 1
    if per_node == 1:
        settings.world = world
        settings.put("num_processes", world.size, "detected", world.reason)
        settings.put("num_machines", max(1, world.size // world.local_size), "detected", world.reason)
        return
    settings.put("num_machines", world.size, "detected", world.reason)
    settings.put("machine_rank", world.rank, "detected", world.reason)
    settings.put("main_process_ip", world.address, "detected", "the first node of the job")
    settings.put("main_process_port", world.port, "detected", "derived from the number of the job")
    if settings.of["num_processes"].source != "flag":
        settings.put("num_processes", per_node * world.size, "detected", f"{per_node} on each of {world.size} nodes")


def _processes_per_node(settings: Settings, nodes: int) -> int:
    if settings.of["num_processes"].source == "flag":
        if settings.num_processes % nodes:
            raise ValueError(
                f"{settings.num_processes} processes cannot be divided evenly over {nodes} nodes: `--num_processes` "
                "counts those of all nodes."
            )
        return max(1, settings.num_processes // nodes)
    return 1 if settings.cpu else max(1, settings.devices.count)


def _range(settings: Settings, environ: Mapping[str, str]) -> None:
    """Of a range of machines, the most; the others may come and go."""
    if settings.nnodes is None:
        return
    if settings.of["num_machines"].source == "flag":
        raise ValueError("`--nnodes` and `--num_machines` mean the same: give only one.")
    settings.put("num_machines", int(settings.nnodes.split(":")[-1]), "flag", f"`--nnodes {settings.nnodes}`")


def _rendezvous(settings: Settings) -> None:
    """Machines that come and go, or are started again, are not counted alike by all: they get their ranks again."""
    given = settings.of["rdzv_backend"]
    ranged = settings.least_machines < settings.num_machines
    if given.value != "static":
        return
    if ranged and given.source == "flag":
        raise ValueError(
            f"`--nnodes {settings.nnodes}` lets machines come and go, which `--rdzv_backend static` cannot do: "
            "leave it out, or give c10d."
        )
    if ranged and not settings.max_restarts:
        raise ValueError(
            f"`--nnodes {settings.nnodes}` lets machines come and go, and the others restart when one leaves: say "
            "how often they may with `--max_restarts`."
        )
    if ranged or (settings.max_restarts and given.source == "default"):
        why = "machines may come and go" if ranged else "machines that are started again find the others"
        settings.put("rdzv_backend", "c10d", "detected", why)


def _deepspeed(settings: Settings, environ: Mapping[str, str]) -> None:
    """Its own files have a say in which machines there are."""
    if settings.use_deepspeed:
        from accelerate.launch.engines import deepspeed

        deepspeed.settle(settings)


def _machines(settings: Settings, environ: Mapping[str, str]) -> None:
    if settings.num_machines is None:
        settings.put("num_machines", 1, "default")
    if settings.num_machines == 1 and settings.world is None and settings.mpirun_hostfile is None:
        idle = [f"`--{name}`" for name in ("machine_rank", "main_process_ip") if _speaks_of_others(settings, name)]
        if idle:
            verb = "have" if len(idle) > 1 else "has"
            settings.notes.append(
                f"{' and '.join(idle)} {verb} no effect without `--num_machines`: all processes start on this machine."
            )
    if settings.num_machines == 1 or settings.world is not None:
        if settings.machine_rank is None:
            settings.put("machine_rank", 0, "default")
        return
    if settings.starts_all_machines:
        return
    _rendezvous(settings)
    if settings.main_process_ip is None:
        raise ValueError(
            f"{settings.num_machines} machines have to meet: give the address of the first with `--main_process_ip`."
        )
    if settings.machine_rank is None:
        if settings.rdzv_backend == "static":
            raise ValueError(
                f"Which of the {settings.num_machines} machines is this? Give `--machine_rank`, from 0 for the first."
            )
        settings.put("machine_rank", 0, "default", f"{settings.rdzv_backend} gives the ranks")
    if not 0 <= settings.machine_rank < settings.num_machines:
        raise ValueError(
            f"`--machine_rank` is {settings.machine_rank}, but {settings.num_machines} machines count from 0 to "
            f"{settings.num_machines - 1}."
        )


def _speaks_of_others(settings: Settings, flag: str) -> bool:
    """Whether a flag was given that says something only where there are several machines."""
    here = (None, 0, "127.0.0.1", "localhost")
    return settings.of[flag].source == "flag" and settings.of[flag].value not in here


def _processes(settings: Settings, environ: Mapping[str, str]) -> None:
    if settings.num_processes is None:
        if settings.cpu:
            settings.put("num_processes", settings.num_machines, "default", "one per machine on the CPU")
        else:
            chosen = _chosen_devices(settings)
            settings.put("num_processes", max(1, chosen) * settings.num_machines, "detected", settings.devices.reason)
    here, found = settings.num_processes // settings.num_machines, _chosen_devices(settings)
    starts_here = settings.world is None and settings.hosts is None
    if 0 < found < here and not settings.cpu and starts_here:
        settings.notes.append(
            f"{here} processes share {found} {settings.devices.kind} device(s): {settings.devices.reason}."
        )
    per_slot = settings.hosts is not None and sum(map(len, settings.hosts.values())) == settings.num_processes
    if settings.num_processes % settings.num_machines and settings.world is None and not per_slot:
        raise ValueError(
            f"{settings.num_processes} processes cannot be divided evenly over {settings.num_machines} machines: "
            "`--num_processes` counts those of all machines."
        )


def _missing_gpus(settings: Settings, environ: Mapping[str, str]) -> None:
    """A run on the CPU is easily taken for one on a GPU."""
    first = settings.world is None or settings.world.rank == 0
    asked = _gpus_asked_for(settings)
    if first and asked and settings.on_cpu and not settings.cpu:
        settings.notes.append(f"{asked}, but no GPU was found ({settings.devices.reason}): this will run on the CPU.")


def _gpus_asked_for(settings: Settings) -> str:
    """In words, who asks for GPUs, if somebody does."""
    multi, ids = settings.of["multi_gpu"], settings.of["gpu_ids"]
    if multi.value:
        return "`--multi_gpu` was given" if multi.source == "flag" else f"{multi.reason} in {settings.config_file}"
    if ids.value not in (None, "all"):
        if ids.source == "flag":
            return f"`--gpu_ids {ids.value}` was given"
        return f"`gpu_ids` is {ids.value} in {settings.config_file}"
    return ""


def _backend(settings: Settings, environ: Mapping[str, str]) -> None:
    """How machines find each other may be something that another package has told torchrun."""
    if settings.rdzv_backend in RENDEZVOUS:
        return
    from importlib.metadata import entry_points

    known = [*RENDEZVOUS, "etcd", "etcd-v2", *(entry.name for entry in entry_points(group="torchrun.handlers"))]
    if settings.rdzv_backend not in known:
        raise ValueError(f"`--rdzv_backend` is {settings.rdzv_backend!r}: choose one of {', '.join(known)}.")


def _files(settings: Settings, environ: Mapping[str, str]) -> None:
    """Says of files that were asked for where they are, or why there are none."""
    if settings.tee != "0" and settings.log_dir is not None:
        folder = Path(settings.log_dir).absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            why = "not writable" if there.is_dir() else "not a folder"
            raise ValueError(f"`--log_dir {settings.log_dir}` cannot be made: {there} is {why}.")
    if settings.tee == "0" and settings.log_dir is not None:
        settings.notes.append("`--log_dir` is where `--tee` writes, which was not given: add `--tee 3` to write files.")
    if settings.tee != "0" and settings.log_dir is None:
        where = os.path.join(environ.get("TMPDIR") or "/tmp", "torchelastic_*")
        settings.notes.append(f"`--tee` writes to a new folder {where}: name one with `--log_dir` to find it again.")


def _chosen_devices(settings: Settings) -> int:
    if settings.devices.count and settings.gpu_ids not in (None, "all"):
        return len(str(settings.gpu_ids).split(","))
    return settings.devices.count


def _threads(settings: Settings, environ: Mapping[str, str]) -> None:
    if settings.num_cpu_threads_per_process is not None or "OMP_NUM_THREADS" in environ:
        return
    here = settings.world.local_size if settings.world is not None else settings.local_processes
    if settings.on_cpu:
        threads, word = max(1, machine.cores() // max(1, here)), "process" if here == 1 else "processes"
        settings.put("num_cpu_threads_per_process", threads, "detected", f"{machine.cores()} cores, {here} {word}")
    else:
        settings.put("num_cpu_threads_per_process", 1, "default", "the work is on the accelerator")


def _no_port(port: int) -> bool:
    return False


def _port(settings: Settings, port_in_use: Callable[[int], bool] | None) -> None:
    """Where the processes meet; only the machine that listens there can tell whether the port is free."""
    port, several = settings.main_process_port, settings.num_machines > 1
    elsewhere = settings.starts_all_machines  # the first machine need not be this one
    if not settings.elastic and not elsewhere:
        return
    from accelerate.launch.meeting import in_use
    from accelerate.machine import get_free_port, is_port_in_use

    if settings.dry_run:  # nothing is started, so no port is needed
        port_in_use = _no_port
        if port == 0:
            settings.put("main_process_port", 0, settings.of["main_process_port"].source, "any that is free")
            return
    port_in_use = port_in_use or is_port_in_use
    if several and not port:
        settings.put("main_process_port", port := DEFAULT_PORT, "default")
    if port:
        listens_here = not several or (settings.machine_rank == 0 and not elsewhere)
        if listens_here and port_in_use(port):
            raise in_use(port)
    elif port is None and not port_in_use(DEFAULT_PORT):
        settings.put("main_process_port", DEFAULT_PORT, "default")
    else:
        why = "0 asks for any free one" if port == 0 else f"{DEFAULT_PORT} is in use"
        settings.put("main_process_port", get_free_port(), "detected", why)


# In this order: what comes later builds on what came before.
_DETECTED = (
    _engine,
    _without_effect,
    _flags_of_the_script,
    _precision,
    _range,
    _tpu,
    _cluster,
    _deepspeed,
    _machines,
    _processes,
    _missing_gpus,
    _threads,
    _backend,
    _files,
)
