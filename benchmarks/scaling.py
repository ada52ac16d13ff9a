"""What many ranks tell each other: counted at 1 to 4,096 of them, in a simulation of the package itself.

    PYTHONPATH=src python benchmarks/scaling.py [--ranks 1 8 64 512 4096] [--anchors 2 4 8] [--json FILE]

Up to 64 ranks are threads, all of them; beyond, three of them, two of which speak for those that are missing (see
`simulated.py`). Both ways are compared where both can be done, and with real processes over gloo at 2, 4 and 8.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.checkpoint import layout
from accelerate.comm import torch_dist
from accelerate.state import stopping
from accelerate.torch_internals.process_groups import all_gather_on, default_store, own_connection
from simulated import CountedStore, Ledger, Simulated, counting, seen

RANKS = [1, 8, 64, 512, 4096]
ANCHORS = [2, 4, 8]
MOST_THREADS = 64
STEPS = 4
BATCH = 32
LOOKS = 60
# Messages that one rank sends in a collective of gloo among n; those of rank 0, where it is the source.
MESSAGES = {
    "all_gather": lambda n: n - 1,  # around a ring
    "all_reduce": lambda n: 2 * (n - 1),
    "broadcast": lambda n: math.ceil(math.log2(n)),  # down a tree
    "broadcast_object_list": lambda n: 2 * math.ceil(math.log2(n)),
    "barrier": lambda n: math.ceil(math.log2(n)),
    "scatter": lambda n: n - 1,
}


class Samples(Dataset):  # type: ignore[type-arg]
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


def workload(ledger: Ledger, folder: str) -> dict[str, float]:
    """What every rank does, phase by phase; returns the processor time of each, of its own thread."""
    spent: dict[str, float] = {}
    began = time.thread_time()

    def phase(name: str) -> None:
        nonlocal began
        spent[ledger.phase] = time.thread_time() - began
        ledger.enter(name)
        began = time.thread_time()

    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    stop = stopping.Stopping(rank, stopping._store(accelerator.state))
    accelerator.__dict__["_stopping"] = stop
    while size > 1 and not ledger.counts["start"]["store wait"]:
        time.sleep(0.001)  # its thread has asked
    phase("first step")
    model = torch.nn.Linear(4, 1)
    data = Samples(BATCH * size * (STEPS + 6))  # the end of an epoch is no part of this
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        DataLoader(data, batch_size=BATCH, shuffle=True),
    )
    for number, batch in enumerate(loader):
        if number == 1:
            phase("step")
        loss = model(batch).sum()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert not accelerator.should_stop
        if number == STEPS:
            phase("end of the epoch")
            break
    phase("gather")
    accelerator.gather(loss.detach())
    phase("save")
    accelerator.save_state(folder)
    phase("load")
    accelerator.load_state(folder)
    if size > 1:
        for name, moves, changes in (("training", 1, 1), ("waiting", 0, 0), ("working", 0, 1)):
            phase(f"minute of {name}")
            _minute(seen.watch, moves, changes)
        seen.watch._pipe.close()
    phase("stop")
    accelerator.wait_for_everyone()  # so that nobody is asked before
    if rank == 0:
        stop._ask(signal.SIGTERM)
    while not accelerator.should_stop:
        time.sleep(0.001)
    phase("end")
    stop.close(at_exit=False)
    accelerator.wait_for_everyone()  # rank 0 has the store
    return spent


def _minute(watched: Any, moves: int, changes: int) -> None:
    """Have a watch look once a second for a minute. moves: collectives that begin in a second; changes: lines."""
    start = time.monotonic()
    watched._shown = 100  # a hang is shown by one rank, once: no part of this
    watched._begun, watched._moved, watched._came = 0, start, start
    watched._written, watched._written_at, watched._outdated = None, start - watched._pause, False
    for second in range(LOOKS):
        line = f"train.py:{second * changes}"
        seen.begun = second * moves
        seen.place = SimpleNamespace(call="work", line=line, waits=not changes, stack="a line of a stack\n" * 20)
        watched._look(start + second)


def simulated(size: int, threads: bool, local_size: int = 8) -> dict[str, Any]:
    """What rank 0 and the last rank did at each phase, and what the store got of all; and what was saved."""
    world = Simulated(size, threads, local_size)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "checkpoint")
        gc.disable()  # it would go through the orders of samples of all ranks, which are in one process here
        try:
            spent = world.run(workload, str(target))
        finally:
            gc.enable()
        saved = _files(target)
    counts = [(ledger.counts, 1 + len(world.spoken_for[rank])) for rank, ledger in world.ledgers.items()]
    return summary(counts) | {"checkpoint": saved, "processor seconds": spent[0]}


def _files(target: Path) -> dict[str, int]:
    files = [path for path in target.rglob("*") if path.is_file()]
    of_ranks = [path for path in files if path.name.startswith(("random_states_", "progress_"))]
    return {
        "files": len(files),
        "files of single ranks": len(of_ranks),
        "bytes of those": sum(path.stat().st_size for path in of_ranks),
        "bytes of the manifest": (target / layout.MANIFEST).stat().st_size,
    }


def summary(ranks: list[tuple[dict[str, Counter[str]], int]]) -> dict[str, Any]:
    """By phase: what rank 0 and the last rank did, messages that rank 0 sends, and what all together ask for.

    ranks: what each did, and how many did the same.
    """
    size = sum(many for _, many in ranks)
    phases: dict[str, Any] = {}
    for phase in dict.fromkeys(phase for counted, _ in ranks for phase in counted):
        counts = [(counted.get(phase, Counter()), many) for counted, many in ranks]
        own, last = counts[0][0], counts[-1][0]
        phases[phase] = {
            "rank 0": dict(sorted(own.items())),
            "another rank": dict(sorted(last.items())),
            "collectives": sum(own[name] for name in MESSAGES),
            "messages that rank 0 sends": sum(count(size) * own[name] for name, count in MESSAGES.items() if own[name]),
            "bytes that a rank gets": sum(own[f"{name} bytes"] for name in MESSAGES),
            "requests to the store": sum(_stored(counted) * many for counted, many in counts),
            "questions asked again": sum(counted["store poll"] * many for counted, many in counts),
            "manifests read": sum(counted["manifest read"] * many for counted, many in counts),
        }
    return {"ranks": size, "phases": phases}


def _stored(counts: Counter[str]) -> int:
    """Requests to the store, without questions that were asked again: how many those are, time decides."""
    return sum(
        count
        for name, count in counts.items()
        if name.startswith("store ") and not name.endswith("bytes") and name != "store poll"
    )


def real(size: int, local_size: int) -> dict[str, Any]:
    """The same in processes over gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank % local_size),
                "LOCAL_WORLD_SIZE": str(min(size, local_size)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--worker", folder]
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        told = [process.communicate(timeout=300)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError(f"A world of {size} processes failed: see above.")
    counts = [{phase: Counter(found) for phase, found in json.loads(text.splitlines()[-1]).items()} for text in told]
    return summary([(counted, 1) for counted in counts])


def counted(folder: str) -> dict[str, Counter[str]]:
    """What this process does, by phase."""
    ledger = Ledger()

    def store(prefix: str = "") -> CountedStore:
        return CountedStore(default_store(prefix), ledger)

    def connection(timeout: Any, prefix: str = "") -> CountedStore:
        ledger.note("store connection")
        own = own_connection(timeout)
        return CountedStore(dist.PrefixStore(prefix, own) if prefix else own, ledger)

    with counting(lambda: ledger, dist, all_gather_on, torch_dist._all_gather, store, connection):
        workload(ledger, str(Path(folder, "checkpoint")))
    return ledger.counts


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two worlds of one size have counted differently."""
    found = []
    for phase, counted in one["phases"].items():
        for who in ("rank 0", "another rank"):
            a, b = (
                {name: count for name, count in world.items() if name != "store poll" and not name.endswith("bytes")}
                for world in (counted[who], other["phases"][phase][who])
            )
            found += [
                f"{phase}, {who}, {name}: {a.get(name, 0)} and {b.get(name, 0)}"
                for name in sorted(a.keys() | b.keys())
                if a.get(name, 0) != b.get(name, 0)
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--anchors", type=int, nargs="*", default=ANCHORS, help="numbers of real processes")
    parser.add_argument("--json", help="where to write what was counted")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(counted(options.worker)), flush=True)
        return
    worlds = [simulated(size, threads=size <= MOST_THREADS) for size in options.ranks]
    wrong = []
    for world in worlds:
        print(f"{world['ranks']} ranks were simulated.")
        if 2 < world["ranks"] <= MOST_THREADS:
            wrong += differences(world, simulated(world["ranks"], threads=False))
    anchors = []
    for size in options.anchors:
        anchors.append(real(size, local_size=2))
        found = differences(anchors[-1], simulated(size, threads=True, local_size=2))
        wrong += found
        print(f"{size} processes and {size} threads have counted {'differently' if found else 'the same'}.")
    if options.json:
        Path(options.json).write_text(json.dumps({"simulated": worlds, "real": anchors}, indent=1) + "\n")
    if wrong:
        raise SystemExit("Counted differently: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
