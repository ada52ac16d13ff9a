"""Run the GPU checks without pytest: `PYTHONPATH=src python3 -m tests.gpu.run [name ...]`.

`--part 2/4` runs every fourth check, from the second on: four of these side by side take a third of the time.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback

from tests.gpu import (  # noqa: F401  (their checks add themselves)
    big_models,
    checks,
    feeding,
    hanging,
    launchers,
    launching,
    loading,
    pinning,
    sharding,
    two_ranks,
)


def run_world(processes: int, name: str) -> str | None:
    """The error of a world of processes that each run the check called `name`, or None."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(processes):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        # NCCL takes one rank for each GPU of a machine: so each rank says that it is on a machine of its own.
        nccl = {"NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **nccl}
        env = {**os.environ, **{key: str(value) for key, value in {**world, **meeting}.items()}}
        command = [sys.executable, "-m", "tests.gpu.run", "--rank", name]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        return "timed out\n" + "\n".join(rank.communicate()[0] for rank in ranks)
    if any(rank.returncode for rank in ranks):
        return "\n".join(outputs)
    return None


def main(names: list[str]) -> int:
    if names[:1] == ["--rank"]:
        {check.__name__: check for _, check in checks.WORLDS}[names[1]]()
        return 0
    part, parts = 1, 1
    if names[:1] == ["--part"]:
        part, parts = (int(number) for number in names[1].split("/"))
        names = names[2:]
    failed = 0
    runs = [(1, check, False) for check in checks.CHECKS] + [(n, check, True) for n, check in checks.WORLDS]
    runs = [run for run in runs if not names or run[1].__name__ in names][part - 1 :: parts]
    for processes, check, in_world in runs:
        began, error = time.monotonic(), None
        if in_world:
            error = run_world(processes, check.__name__)
        else:
            checks.reset()
            try:
                check()
            except Exception:
                error = traceback.format_exc()
        failed += error is not None
        print(f"{'FAILED' if error else 'passed'}  {check.__name__}  {time.monotonic() - began:.1f} s", flush=True)
        if error:
            print(error, flush=True)
    print(f"{len(runs) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
