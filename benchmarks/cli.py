"""What the command line costs: help, a wrong flag, `env`, and what a launch adds to starting a script without it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Row, Subject, duration

# Imports nothing, so that the figures are those of the launchers.
SCRIPT = "import os\nprint('rank', os.environ.get('RANK', '-'))\n"


@dataclass(frozen=True)
class Taken:
    """Seconds on the clock, and seconds of processor time: the second stays true on a busy machine."""

    wall: float
    cpu: float

    def less(self, other: Taken) -> Taken:
        return Taken(self.wall - other.wall, self.cpu - other.cpu)


def take(command: Sequence[str], env: dict[str, str], codes: tuple[int, ...] = (0,)) -> Taken:
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Taken(wall, cpu)


@dataclass(frozen=True)
class Figure:
    """A command line and its target; with `plain`, what counts is how much longer than that it takes."""

    name: str
    words: tuple[str, ...]
    limit: float
    codes: tuple[int, ...] = (0,)
    plain: tuple[str, ...] = ()


def figures(script: str) -> list[Figure]:
    elastic = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29711", script)
    two = ("launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "29711", script)
    return [
        Figure("accelerate --help", ("--help",), 0.3),
        Figure("accelerate launch --help", ("launch", "--help"), 0.3),
        Figure("accelerate launch, a wrong flag", ("launch", "--nonsense"), 0.3, codes=(1, 2)),
        Figure("accelerate env", ("env",), 1.0),
        Figure("accelerate launch, one process, over python", ("launch", "--cpu", script), 0.2, plain=(script,)),
        Figure("accelerate launch, two processes, over torchrun", two, 0.3, plain=elastic),
    ]


def measure(peer: Subject, ours: Subject, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        return [_row(figure, {"peer": peer, "ours": ours}, folder, rounds) for figure in figures(str(script))]


def _row(figure: Figure, pair: dict[str, Subject], folder: str, rounds: int) -> Row:
    taken: dict[str, list[Taken]] = {name: [] for name in pair}
    plain: list[Taken] = []
    target = f"<= {figure.limit} s"
    try:
        for number in range(rounds + 1):
            for name, subject in pair.items():
                env = {**subject.environment("cpu"), "HF_HOME": folder}
                command = [subject.python, "-m", "accelerate.commands.accelerate_cli", *figure.words]
                one = take(command, env, figure.codes)
                base = take([subject.python, *figure.plain], env) if figure.plain else Taken(0, 0)
                if number:  # the first fills the file cache and writes the bytecode
                    taken[name].append(one.less(base))
                    plain.append(base)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return Row(figure.name, {}, "failed", target, False, {"error": str(error)})
    wall = {name: statistics.median(one.wall for one in values) for name, values in taken.items()}
    cpu = {name: statistics.median(one.cpu for one in values) for name, values in taken.items()}
    sign = "+" if figure.plain else ""
    cells = {name: f"{sign}{duration(wall[name])} (cpu {duration(cpu[name])})" for name in pair}
    if figure.plain:
        cells["plain"] = duration(statistics.median(one.wall for one in plain))
    return Row(
        figure.name,
        cells,
        f"{wall['ours'] / wall['peer']:.3f} x peer" if wall["peer"] > 0 else "-",
        target,
        wall["ours"] <= figure.limit,
        {"median_seconds": wall, "median_cpu_seconds": cpu, "rounds": rounds},
    )
