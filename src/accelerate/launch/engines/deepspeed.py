"""DeepSpeed: on one machine, or where every machine starts its own, torch elastic; else DeepSpeed's own launcher."""

from __future__ import annotations

from accelerate.environments.base import DEFAULT_PORT
from accelerate.launch.engines import elastic
from accelerate.launch.plan import Engine, LaunchPlan
from accelerate.launch.settings import Settings


def own_launcher(settings: Settings) -> list[str]:
    """The words for DeepSpeed's launcher, which starts the other machines."""
    words = ["deepspeed"]
    if settings.deepspeed_hostfile is not None:
        words += ["--hostfile", str(settings.deepspeed_hostfile)]
    launcher = settings.deepspeed_multinode_launcher or "pdsh"
    if launcher == "nossh":
        words += ["--node_rank", str(settings.machine_rank), "--no_ssh"]
    else:
        words += ["--no_local_rank", "--launcher", str(launcher)]
    if settings.deepspeed_exclusion_filter is not None:
        words += ["--exclude", str(settings.deepspeed_exclusion_filter)]
    elif settings.deepspeed_inclusion_filter is not None:
        words += ["--include", str(settings.deepspeed_inclusion_filter)]
    else:
        words += ["--num_gpus", str(settings.local_processes)]
    if settings.main_process_ip is not None:
        port = str(settings.main_process_port or DEFAULT_PORT)
        words += ["--master_addr", str(settings.main_process_ip), "--master_port", port]
    if settings.module:
        words.append("--module")
    elif settings.no_python:
        words.append("--no_python")
    return [*words, settings.script, *settings.script_args]


def _plan(settings: Settings) -> LaunchPlan:
    standard = settings.num_machines == 1 or settings.deepspeed_multinode_launcher == "standard"
    if standard:
        return elastic.ENGINE.plan(settings)
    return LaunchPlan(
        "DeepSpeed's launcher",
        own_launcher(settings),
        elastic.environment(settings),
        refused=(
            "starting several machines with DeepSpeed's launcher",
            "start each with `--deepspeed_multinode_launcher standard` and its `--machine_rank`.",
        ),
    )


ENGINE = Engine(matches=lambda settings: bool(settings.use_deepspeed), plan=_plan)
