"""Saving and loading a model with AdamW: the time training stands still, beside a plain write of the same bytes.

    python benchmarks/checkpoint.py --peer .venv-peer/bin/python          # a small model
    python benchmarks/checkpoint.py --peer python3 --width 8192 --depth 6   # 4.5 GiB, for a machine with a GPU

This file is also the script of its subjects: `--worker` runs with the package that its Python imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def best(function: Callable[[], Any], rounds: int) -> float:
    """The shortest time of several, each from a quiet disk."""
    times = []
    for _ in range(rounds):
        os.sync()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def worker(width: int, depth: int, rounds: int, folder: str) -> None:
    import torch

    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, width, device=accelerator.device)).sum())
    optimizer.step()
    optimizer.zero_grad()

    def finished(function: Callable[[], Any]) -> None:
        function()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        accelerator.wait_for_everyone()

    times = {"save": best(lambda: finished(lambda: accelerator.save_state(folder)), rounds)}
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    times["load"] = best(lambda: finished(lambda: accelerator.load_state(folder)), rounds)
    if hasattr(accelerator, "wait_for_checkpoint"):
        stalls = []
        for _ in range(rounds):
            os.sync()
            start = time.perf_counter()
            finished(lambda: accelerator.save_state(folder, async_save=True))
            stalls.append(time.perf_counter() - start)
            accelerator.wait_for_checkpoint()
        times["stall of an asynchronous save"] = min(stalls)
    if accelerator.is_main_process:
        content = memoryview(bytearray(1 << 24))

        def plain() -> None:
            with open(os.path.join(folder, "plain"), "wb") as file:
                for _ in range(size >> 24):
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())

        times["plain write of the same bytes"] = best(plain, rounds)
        print(json.dumps({"bytes": size, **times}))


def subject(python: str, source: str | None, processes: int, options: argparse.Namespace) -> dict[str, float]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if source is not None:
        environ["PYTHONPATH"] = source
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = command if processes > 1 else [python]
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        arguments = ["--worker", folder, "--width", options.width, "--depth", options.depth, "--rounds", options.rounds]
        done = subprocess.run(
            [*command, __file__, *map(str, arguments)], env=environ, cwd=folder, stdout=subprocess.PIPE, check=True
        )
    finally:
        shutil.rmtree(folder)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", default=sys.executable, help="a python that has the released package")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", default=None, help="where to write; by default the folder for temporary files")
    parser.add_argument("--json", default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.width, options.depth, options.rounds, options.worker)
        return
    options.peer = os.path.abspath(options.peer)  # the workers run in a folder of their own
    rows = {}
    for processes in options.processes:
        ours = subject(sys.executable, str(ROOT / "src"), processes, options)
        peer = subject(options.peer, None, processes, options)
        rows[processes] = {"ours": ours, "peer": peer}
        print(f"{processes} processes, {ours['bytes'] / 2**20:.0f} MiB")
        for name, value in ours.items():
            if name != "bytes":
                print(f"  {name:32} ours {value:8.3f} s   peer {peer.get(name, float('nan')):8.3f} s")
    if options.json is not None:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
