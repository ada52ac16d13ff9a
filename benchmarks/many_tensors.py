"""Saving and loading many small tensors: linear layers of 8 x 8 with AdamW, six tensors of state for each.

    python benchmarks/many_tensors.py --peer .venv-peer/bin/python [--layers 2000 8000] [--processes 1 2] [--json FILE]

This file is also the script of its subjects: `--worker` runs with the package that its Python imports. Subjects take
turns. Beside the time that passes is that of the processor, which stays true on a busy machine. What counts is the
second save and the second load of a process: the first ones import what they need.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import interpreter

ROOT = Path(__file__).resolve().parents[1]


def worker(layers: int) -> None:
    import torch

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    folder = Path(os.environ["MANY_TENSORS_FOLDER"])
    found: dict[str, Any] = {}
    for _ in range(2):
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
        accelerator.wait_for_everyone()
        found["save"] = timed(lambda: accelerator.save_state(str(folder)))
        accelerator.wait_for_everyone()
        found["load"] = timed(lambda: accelerator.load_state(str(folder)))
    if accelerator.is_main_process:
        print(json.dumps(found))
    accelerator.end_training()


def timed(function: Callable[[], Any]) -> dict[str, float]:
    began, processor = time.perf_counter(), time.process_time()
    function()
    return {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}


def run(python: str, pythonpath: str, layers: int, processes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": pythonpath, "OMP_NUM_THREADS": "1"}
        env["MANY_TENSORS_FOLDER"] = os.path.join(folder, "checkpoint")
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [python, *(several if processes > 1 else []), __file__, "--worker", str(layers)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer", default="", help="the Python of the released package")
    parser.add_argument("--layers", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    subjects = {"ours": (sys.executable, str(ROOT / "src"))}
    if options.peer:
        subjects["peer"] = (interpreter(options.peer), "")
    results = []
    for processes in options.processes:
        for layers in options.layers:
            rounds = [
                {name: run(*subject, layers, processes) for name, subject in subjects.items()}
                for _ in range(options.rounds)
            ]
            for what in ("save", "load"):
                row: dict[str, Any] = {"processes": processes, "layers": layers, "what": what}
                for name in subjects:
                    for unit in ("seconds", "processor"):
                        row[f"{name}_{unit}"] = statistics.median(one[name][what][unit] for one in rounds)
                results.append(row)
                print(
                    " ".join(
                        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
                        for key, value in row.items()
                    )
                )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
