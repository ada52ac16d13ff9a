"""How long a shuffled loader takes to its first batch, and to one in the middle of an epoch; and how much memory.

    PYTHONPATH=src python benchmarks/shuffling.py [--json FILE]

Each figure is of a process of its own: torch's loader, this package's as it is by default, and with shuffle="indexed".
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = [
    ("plain", 5_000_000),
    ("default", 5_000_000),
    ("indexed", 5_000_000),
    ("plain", 50_000_000),
    ("default", 50_000_000),
    ("indexed", 50_000_000),
    ("indexed", 10_000_000_000),
]


def worker(kind: str, samples: int) -> dict[str, Any]:
    from torch.utils.data import DataLoader, Dataset

    from accelerate import Accelerator, DataLoaderConfiguration

    class Numbers(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> int:
            return index

    config = DataLoaderConfiguration(shuffle="indexed" if kind == "indexed" else None)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader: Any = DataLoader(Numbers(), batch_size=32, shuffle=True)
    if kind != "plain":
        loader = accelerator.prepare(loader)
        next(iter(accelerator.prepare(DataLoader(range(64), batch_size=32, shuffle=True))))  # type: ignore[arg-type]
    began, processor = time.perf_counter(), time.process_time()
    next(iter(loader))
    found = {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}
    if kind == "indexed":
        began = time.perf_counter()
        next(iter(accelerator.skip_first_batches(loader, samples // 64)))
        found["middle_seconds"] = time.perf_counter() - began
    found["mebibytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker[0], int(options.worker[1]))))
        return
    results = []
    for kind, samples in CASES:
        command = [sys.executable, __file__, "--worker", kind, str(samples)]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
        )
        row = {"kind": kind, "samples": samples, **json.loads(done.stdout.splitlines()[-1])}
        results.append(row)
        print(
            " ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
