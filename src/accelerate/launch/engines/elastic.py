"""Several processes on this machine, or several machines: torch elastic."""

from __future__ import annotations

from accelerate.config.environment import check_cuda_p2p_ib_support
from accelerate.config.options import variable
from accelerate.launch.engines import single
from accelerate.launch.plan import OWN_PYTHON, LaunchEngine, LaunchPlan
from accelerate.launch.settings import Settings
from accelerate.launch.variables import variables

MODULE = "accelerate.launch.elastic"


def torchrun_arguments(settings: Settings) -> list[str]:
    """What torchrun is told."""
    words = [
        f"--nnodes={settings.nnodes or settings.num_machines}",
        f"--nproc_per_node={settings.local_processes}",
        *_meeting_point(settings),
        f"--max_restarts={settings.max_restarts}",
        f"--monitor_interval={settings.monitor_interval}",
        f"--role={settings.role}",
    ]
    if settings.rdzv_conf:
        words.append(f"--rdzv_conf={settings.rdzv_conf}")
    if settings.tee != "0":
        words.append(f"--tee={settings.tee}")
        if settings.log_dir is not None:  # else there is nothing to write, and torch elastic would leave empty folders
            words.append(f"--log_dir={settings.log_dir}")
    if settings.module:
        words.append("--module")
    if settings.no_python:
        words.append("--no_python")
    return words


def environment(settings: Settings) -> dict[str, str]:
    """The variables for the workers."""
    env = {variable("cpu"): "True"} if settings.cpu else {}
    if settings.devices.kind == "cuda" and settings.local_processes > 1 and not check_cuda_p2p_ib_support():
        env |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return {**env, **variables(settings, settings.devices)}


def _meeting_point(settings: Settings) -> list[str]:
    backend = [f"--rdzv_backend={settings.rdzv_backend}"]
    port = settings.main_process_port
    if settings.num_machines == 1:
        here = f"--master_port={port}" if settings.rdzv_backend == "static" else f"--rdzv_endpoint=127.0.0.1:{port}"
        return [*backend, here]
    rank = f"--node_rank={settings.machine_rank}"
    if settings.same_network and settings.rdzv_backend == "static":
        return [*backend, rank, f"--master_addr={settings.main_process_ip}", f"--master_port={port}"]
    return [*backend, rank, f"--rdzv_endpoint={settings.main_process_ip}:{port}"]


def _own_arguments(settings: Settings) -> list[str]:
    """What our own module is told, before the words for torchrun."""
    words = ["--quiet"] if settings.quiet else []
    asked = settings.of["main_process_port"].source in ("flag", "file")
    # Between this look at the port and its use, another run may take it.
    return words if asked or settings.num_machines > 1 else [*words, "--any_port"]


def _plan(settings: Settings) -> LaunchPlan:
    told = [*_own_arguments(settings), *torchrun_arguments(settings)]
    argv = [*OWN_PYTHON, "-m", MODULE, *told, settings.script, *settings.script_args]
    words = _in_words(settings)
    # Said aloud, because a run on the CPU is easily taken for one on a GPU.
    notes = [f"starting {words}"] if settings.on_cpu else []
    return LaunchPlan(words, argv, environment(settings), single.command(settings), becomes=True, notes=notes)


def _in_words(settings: Settings) -> str:
    where = "on the CPU, with gloo" if settings.on_cpu else f"one per {settings.devices.kind} device"
    least, most = settings.least_machines, settings.num_machines
    count = f"{least} to {most}" if least < most else str(most)
    machines = f" on each of {count} machines" if most > 1 else ""
    word = "process" if settings.local_processes == 1 else "processes"
    return f"{settings.local_processes} {word}{machines}, {where}"


ENGINE = LaunchEngine(matches=lambda settings: settings.elastic, plan=_plan)
