"""`gather` of small tensors beside `all_gather` by hand: run with `python -m torch.distributed.run --nproc_per_node 2`.

By hand it is known beforehand that all ranks have tensors of the same kind; `gather` finds that out, and takes tensors
of different lengths. Both in turns, call by call, in the same processes; of the times of a round the median counts, and
of those of the rounds again. With the released package in the environment it is measured in the same way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import accelerate
from accelerate import Accelerator

SIZES = (256, 4096, 65536)
CALLS, ROUNDS = 200, 15


def plain(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def seconds(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """What each of two takes, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * CALLS):
        dist.barrier()
        began = time.perf_counter()
        (first, second)[number % 2]()
        times[number % 2].append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    found = {}
    for size in SIZES:
        tensor = torch.ones(size // 4)
        rounds = [seconds(lambda t=tensor: plain(t), lambda t=tensor: accelerator.gather(t)) for _ in range(ROUNDS)]  # type: ignore[misc]
        by_hand, ours = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
        ratio = statistics.median(second / first for first, second in rounds)
        found[str(size)] = {"all_gather_us": by_hand, "gather_us": ours, "ratio": ratio}
        if accelerator.is_main_process:
            figures = f"all_gather {by_hand:.0f} us, gather {ours:.0f} us, {ratio:.2f} of it"
            print(f"{accelerate.__version__}, {size:6} bytes: {figures}")
    if options.json and accelerator.is_main_process:
        with open(options.json, "w") as file:
            json.dump({"version": accelerate.__version__, "bytes": found}, file, indent=2)
    accelerator.end_training()


if __name__ == "__main__":
    main()
