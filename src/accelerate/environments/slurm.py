"""Slurm: `srun python train.py` with several tasks, on one node or many."""

from __future__ import annotations

import re
from collections.abc import Mapping

from accelerate.environments.base import World, integer


def detect(environ: Mapping[str, str]) -> World | None:
    # SLURM_STEP_NUM_TASKS is set inside an srun step only: the batch script itself also has SLURM_PROCID=0
    # and SLURM_NTASKS=n, and must stay a single process.
    size = integer(environ, ["SLURM_STEP_NUM_TASKS"])
    rank = integer(environ, ["SLURM_PROCID"])
    if size is None or size < 2 or rank is None:
        return None
    nodes = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    local_size = _tasks_on_node(environ, size)
    return World(
        rank=rank,
        size=size,
        local_rank=integer(environ, ["SLURM_LOCALID"], rank % local_size) or 0,
        local_size=local_size,
        address=environ.get("MASTER_ADDR") or (nodes[0] if len(nodes) > 1 else "127.0.0.1"),
        port=integer(environ, ["MASTER_PORT"]) or _port(environ),
        started_by="srun",
        reason=f"a Slurm step of {size} tasks has set SLURM_PROCID={rank}",
    )


def _port(environ: Mapping[str, str]) -> int:
    """One port per job and step, the same on all ranks, so that jobs sharing a node do not meet."""
    job, step = integer(environ, ["SLURM_JOB_ID"], 0) or 0, integer(environ, ["SLURM_STEP_ID"], 0) or 0
    return 20000 + (job * 37 + step) % 40000


def _tasks_on_node(environ: Mapping[str, str], size: int) -> int:
    """SLURM_STEP_TASKS_PER_NODE reads like `2(x3),1`: two tasks on each of three nodes, then one."""
    node = integer(environ, ["SLURM_NODEID"], 0) or 0
    counts: list[int] = []
    for part in (environ.get("SLURM_STEP_TASKS_PER_NODE") or str(size)).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts[node] if node < len(counts) else size


def expand_hosts(nodelist: str) -> list[str]:
    """`gpu[01-03,7],login` -> gpu01, gpu02, gpu03, gpu7, login."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", nodelist):
        match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            hosts.append(part)
            continue
        prefix, ranges, rest = match.groups()
        for item in ranges.split(","):
            first, _, last = item.partition("-")
            for number in range(int(first), int(last or first) + 1):
                hosts += expand_hosts(f"{prefix}{number:0{len(first)}d}{rest}")
    return hosts
