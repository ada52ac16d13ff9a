"""What importing the package costs, each time in a fresh interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from harness import Row, Subject, duration

# Prints whether torch came along; the time is taken from outside.
PACKAGE = "import accelerate, sys; print('torch' in sys.modules)"
# Inside one process, so that the spread of torch's own import stays out of the difference.
ACCELERATOR = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
from accelerate import Accelerator
imported = time.perf_counter()
Accelerator(cpu=True)
print(middle - start, imported - middle, time.perf_counter() - imported)
"""


def run(subject: Subject, code: str) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(
        [subject.python, "-c", code],
        env=subject.environment("cpu"),
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - start, done.stdout


def measure(peer: Subject, ours: Subject, rounds: int) -> list[Row]:
    pair = {"peer": peer, "ours": ours}
    package: dict[str, list[float]] = {name: [] for name in pair}
    added: dict[str, list[float]] = {name: [] for name in pair}
    first: dict[str, list[float]] = {name: [] for name in pair}
    torch: list[float] = []
    with_torch: dict[str, bool] = {}
    try:
        for number in range(rounds + 1):
            for name, subject in pair.items():
                empty, _ = run(subject, "pass")
                whole, printed = run(subject, PACKAGE)
                before, after, made = (float(word) for word in run(subject, ACCELERATOR)[1].split())
                if number == 0:  # fills the file cache and writes the bytecode
                    continue
                package[name].append(whole - empty)
                added[name].append(after)
                first[name].append(made)
                torch.append(before)
                with_torch[name] = printed.strip() == "True"
    except subprocess.CalledProcessError as error:
        print(f"import: {error}\n{error.stderr}", file=sys.stderr)
        return [Row("import accelerate", {}, "failed", "<= 0.05 s, no torch", False, {"error": error.stderr})]
    return [whole_row(package, with_torch), added_row(added, torch), first_row(first)]


def whole_row(package: dict[str, list[float]], with_torch: dict[str, bool]) -> Row:
    median = {name: statistics.median(values) for name, values in package.items()}
    said = {name: "with torch" if with_torch[name] else "no torch" for name in package}
    return Row(
        "import accelerate",
        {name: f"{duration(median[name])}, {said[name]}" for name in package},
        f"{median['ours'] / median['peer']:.3f} x peer",
        "<= 0.05 s, no torch",
        median["ours"] <= 0.05 and not with_torch["ours"],
        {"median_seconds": median, "imports_torch": with_torch, "rounds": len(package["ours"])},
    )


def added_row(added: dict[str, list[float]], torch: Sequence[float]) -> Row:
    median = {name: statistics.median(values) for name, values in added.items()}
    return Row(
        "from accelerate import Accelerator, after import torch",
        {
            "plain": f"torch {duration(statistics.median(torch))}",
            **{n: f"+{duration(median[n])}" for n in added},
        },
        f"{median['ours'] / median['peer']:.3f} x peer",
        "<= 0.04 s",
        median["ours"] <= 0.04,
        {
            "median_added_seconds": median,
            "median_torch_seconds": statistics.median(torch),
            "rounds": len(torch) // 2,
        },
    )


def first_row(first: dict[str, list[float]]) -> Row:
    median = {name: statistics.median(values) for name, values in first.items()}
    return Row(
        "the first Accelerator()",
        {name: duration(median[name]) for name in first},
        f"{median['ours'] / median['peer']:.3f} x peer",
        "<= 0.005 s",
        median["ours"] <= 0.005,
        {"median_seconds": median, "rounds": len(first["ours"])},
    )
