"""Saving and loading a model with AdamW: the time training stands still, beside a plain write of the same bytes.

    python benchmarks/checkpoint.py --peer .venv-peer/bin/python          # a small model, one and two processes
    PYTHONPATH=src python3 benchmarks/checkpoint.py --peer python3 --width 8192 --depth 6 --processes 1
                                                                          # 4.5 GiB, for a machine with a GPU

This file is also the script of its subjects: `--worker` runs with the package that its Python imports. Subjects take
turns; a save, a plain write, a load and a plain copy in memory, by every process at once, follow each other in every
round. The first load of a process is that of a run which resumes, in a process of its own: its optimizer has not
stepped, so the memory for what it loads comes from the system, as that of the copy which is timed beside it. Later ones
find memory in the process: ours that of the optimizer, the peer some that was freed. Host memory is what a save or a
load took at most beyond what the process had before, without mapped files (Linux). The parts of the time are of a save
and a load of their own, and add up to more than it lasted, because they go on at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import interpreter

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = "checkpoint"
SAVE, LOAD, STALL, BEHIND = "save", "load", "asynchronous save: stall", "asynchronous save: until it is on the disk"
PLAIN = "plain write of the same bytes, flushed"
COPY = "copy of the same bytes in memory"
FIRST = "the first load of a process"
NEW = "copy of the same bytes to new memory"


def memory_peak(function: Callable[[], Any]) -> int:
    """By how much the memory of this process grew at most while `function` ran, in bytes; 0 where that is not told."""
    most = before = _memory()
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.001):
            most = max(most, _memory())

    thread = threading.Thread(target=watch)
    thread.start()
    function()
    over.set()
    thread.join()
    return most - before


def _memory() -> int:
    """Without mapped files, which the system takes back when it needs room."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Stages:
    """Where the time of our save or load goes: seconds of all threads together, by what they did."""

    def __init__(self) -> None:
        from accelerate.devices import cuda_lane
        from accelerate.io import blocks, disk, host_memory

        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._plain: list[tuple[Any, str, Any]] = []
        for owner, name, what in (
            (blocks.BlockCopies, "copy", "copies from the device"),
            (cuda_lane.CudaLane, "send", "sending to the device"),
            (blocks, "crc32", "checksums"),
            (host_memory, "copy", "copies in host memory"),
            (disk, "bring_in", "mapping"),
            (disk, "get_pages", "memory from the system"),
            (disk, "write", "writing"),
            (disk, "start_flush", "starting to flush"),
            (disk, "sync", "flushing"),
            (disk, "read", "reading"),
            (disk, "rename", "renaming"),
            (disk, "remove_tree", "removing"),
        ):
            self._plain.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(getattr(owner, name), what))

    def _timed(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                with self._lock:
                    self.seconds[what] += time.perf_counter() - start

        return timed

    def taken(self) -> dict[str, float]:
        for owner, name, function in self._plain:
            setattr(owner, name, function)
        return dict(self.seconds)


class Training:
    """A model with AdamW in the package that this Python imports, and the times of what it does."""

    def __init__(self, width: int, depth: int) -> None:
        import torch

        from accelerate import Accelerator

        # The peer forms no group on CPUs unless it is told to use them.
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        assert self.accelerator.num_processes == int(os.environ.get("WORLD_SIZE", "1"))
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        self.width = width
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.processor: defaultdict[str, list[float]] = defaultdict(list)

    def step(self) -> None:
        import torch

        batch = torch.ones(1, self.width, device=self.accelerator.device)
        self.accelerator.backward(self.model(batch).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measured(self, name: str, function: Callable[[], Any]) -> None:
        import torch

        if self.accelerator.is_main_process:
            os.sync()  # from a quiet disk
        time.sleep(0.3)  # our save frees what it has replaced behind the training
        self.accelerator.wait_for_everyone()
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        function()
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        self.accelerator.wait_for_everyone()
        self.times[name].append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.processor[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    def tell(self, **facts: Any) -> None:
        if self.accelerator.is_main_process:
            print(json.dumps(facts | {"times": self.times, "processor": self.processor}))


def resume(width: int, depth: int, target: str) -> None:
    import torch

    training = Training(width, depth)
    training.measured(FIRST, lambda: training.accelerator.load_state(target))
    size = _size(target)
    memory = torch.ones(1 << 26, dtype=torch.uint8)
    new = torch.empty(size // len(memory), len(memory), dtype=torch.uint8)
    training.measured(NEW, lambda: new.copy_(memory))
    training.tell()


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).iterdir())


def worker(width: int, depth: int, rounds: int, folder: str) -> None:
    import torch

    training = Training(width, depth)
    training.step()
    accelerator, measured = training.accelerator, training.measured
    ours = hasattr(accelerator, "wait_for_checkpoint")
    target = os.path.join(folder, CHECKPOINT)
    content = memoryview(bytearray(os.urandom(1 << 24)))

    def plain() -> None:
        if not accelerator.is_main_process:
            return
        with open(os.path.join(folder, "plain"), "wb") as file:
            left = size
            while left > 0:
                file.write(content[: min(left, len(content))])
                left -= len(content)
            file.flush()
            os.fsync(file.fileno())

    def copy() -> None:
        for _ in range(size // (1 << 26)):
            memory[1].copy_(memory[0])

    memory = torch.ones(2, 1 << 26, dtype=torch.uint8)

    def behind() -> None:
        accelerator.save_state(target, async_save=True)

    for number in range(rounds + 1):  # the first one warms up, and is not counted
        if number == 1:
            training.times.clear()
            training.processor.clear()
        measured(SAVE, lambda: accelerator.save_state(target))
        size = _size(target)
        measured(PLAIN, plain)
        if accelerator.is_main_process:
            os.remove(os.path.join(folder, "plain"))
        measured(LOAD, lambda: accelerator.load_state(target))
        measured(COPY, copy)
        if ours:
            measured(STALL, behind)
            start = time.perf_counter()
            accelerator.wait_for_checkpoint()
            accelerator.wait_for_everyone()
            training.times[BEHIND].append(training.times[STALL][-1] + time.perf_counter() - start)
    if ours:
        accelerator._background.memory = type(accelerator._background.memory)()  # as before the first one
    peaks = {SAVE: memory_peak(lambda: accelerator.save_state(target))}
    accelerator.wait_for_everyone()
    peaks[LOAD] = memory_peak(lambda: accelerator.load_state(target))
    stages = {}
    if ours:

        def whole() -> None:
            behind()
            accelerator.wait_for_checkpoint()

        peaks[STALL] = memory_peak(whole)
        for name, work in ((SAVE, accelerator.save_state), (LOAD, accelerator.load_state)):
            watch = Stages()
            work(target)
            stages[name] = watch.taken()
    training.tell(bytes=size, memory=peaks, stages=stages, device=str(accelerator.device), torch=torch.__version__)


def subject(python: str, source: str | None, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if source is not None:
        environ["PYTHONPATH"] = source
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = command if processes > 1 else [python]
    folder = tempfile.mkdtemp(dir=options.folder)

    def run(*arguments: Any) -> dict[str, Any]:
        arguments = (*arguments, "--width", options.width, "--depth", options.depth, "--rounds", options.rounds)
        done = subprocess.run(
            [*command, __file__, *map(str, arguments)], env=environ, cwd=folder, stdout=subprocess.PIPE, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    try:
        facts = run("--worker", folder)
        resumed = [run("--resume", os.path.join(folder, CHECKPOINT)) for _ in range(options.rounds)]
    finally:
        shutil.rmtree(folder)
    for part in ("times", "processor"):
        for name in (FIRST, NEW):
            facts[part][name] = [value for one in resumed for value in one[part][name]]
    return facts


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one subject as one: all times, the least memory that was enough."""
    found = dict(runs[-1])
    for part in ("times", "processor"):
        found[part] = {name: [value for run in runs for value in run[part][name]] for name in runs[0][part]}
    return found


def show(processes: int, ours: dict[str, Any], peer: dict[str, Any]) -> None:
    size = ours["bytes"]
    print(
        f"\n{processes} processes on {ours['device']}, {size / 2**20:.0f} MiB in a checkpoint: median (least) seconds"
    )
    for name in (SAVE, LOAD, FIRST, STALL, BEHIND, PLAIN, COPY, NEW):
        cells = []
        for subject in (ours, peer):
            values = subject["times"].get(name)
            cells.append(f"{statistics.median(values):7.3f} ({min(values):6.3f})" if values else " " * 16)
        print(f"  {name:44} ours {cells[0]}   peer {cells[1]}")
    for label, one in (("ours", ours), ("peer", peer)):
        ratios = [save / plain for save, plain in zip(one["times"][SAVE], one["times"][PLAIN], strict=True)]
        work = {name: statistics.median(values) for name, values in one["processor"].items()}
        taken = ", ".join(f"{name} {work[name]:.2f}" for name in (SAVE, LOAD, STALL, PLAIN) if name in work)
        held = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in one["memory"].items())
        print(f"  {label}: save / plain write {statistics.median(ratios):.2f}, processor seconds: {taken}")
        print(f"        host memory at most beyond what was there: {held}")
    for name in (LOAD, FIRST, STALL):
        other = SAVE if name == STALL else name
        share = statistics.median(ours["times"][name]) / statistics.median(peer["times"][other])
        print(f"  our {name} / the peer's {other}: {share:.2f}")
    for name, stages in ours["stages"].items():
        parts = ", ".join(f"{what} {seconds:.2f}" for what, seconds in sorted(stages.items(), key=lambda s: -s[1]))
        print(f"  where the time of a {name} goes (thread seconds): {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", type=interpreter, default=sys.executable, help="a python that has the released package"
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="how often each package is started")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", default=None, help="where to write; by default the folder for temporary files")
    parser.add_argument("--json", default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--resume", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.width, options.depth, options.rounds, options.worker)
        return
    if options.resume is not None:
        resume(options.width, options.depth, options.resume)
        return
    rows = {}
    for processes in options.processes:
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
        for _ in range(options.turns):
            runs["ours"].append(subject(sys.executable, str(ROOT / "src"), processes, options))
            runs["peer"].append(subject(options.peer, None, processes, options))
        rows[processes] = {name: together(several) for name, several in runs.items()}
        show(processes, rows[processes]["ours"], rows[processes]["peer"])
    if options.json is not None:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
