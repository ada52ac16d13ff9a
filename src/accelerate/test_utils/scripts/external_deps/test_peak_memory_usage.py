"""Measures the memory at the peak of each epoch, and checks it against a bound.

`accelerate launch test_peak_memory_usage.py --output_dir FOLDER --peak_memory_upper_bound 2000`, in megabytes.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import psutil
import torch

from accelerate.accelerator import Accelerator
from accelerate.test_utils import pair_training
from accelerate.test_utils.backend import torch_device
from accelerate.test_utils.checks import expect
from accelerate.test_utils.sentence_pairs import get_dataloaders as get_dataloaders

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 32


def b2mb(x: float) -> int:
    """Bytes as whole megabytes."""
    return int(x / 2**20)


class TorchTracemalloc:
    """Measures the memory of the device, or on a CPU that of the process, inside a block.

    Afterwards `begin`, `end` and `peak` are bytes, and `used` and `peaked` what the block added, in megabytes.
    """

    def __enter__(self) -> TorchTracemalloc:
        gc.collect()
        self.device: Any = None if torch_device == "cpu" else getattr(torch, torch_device)
        if self.device is not None:
            self.device.empty_cache()
            self.device.reset_peak_memory_stats()
        self.begin = self._now()
        return self

    def __exit__(self, *exc: object) -> None:
        gc.collect()
        self.end = self._now()
        self.peak = max(self._most(), self.begin, self.end)
        self.used = b2mb(self.end - self.begin)
        self.peaked = b2mb(self.peak - self.begin)

    def _now(self) -> int:
        return int(psutil.Process().memory_info().rss if self.device is None else self.device.memory_allocated())

    def _most(self) -> int:
        if self.device is not None:
            return int(self.device.max_memory_allocated())
        info: Any = psutil.Process().memory_info()
        if hasattr(info, "peak_wset"):  # Windows
            return int(info.peak_wset)
        import resource
        import sys

        # Since the process began, and not since the block did: the system keeps no other.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


def training_function(config: dict[str, Any], args: Any) -> None:
    """Trains, and compares the peak of each epoch with the bound."""
    accelerator = Accelerator()
    parts = pair_training.prepare(accelerator, config, args.model_name_or_path, (args.n_train, args.n_val))
    peaks = {}
    for epoch in range(config["num_epochs"]):
        with TorchTracemalloc() as memory:
            pair_training.train_epoch(accelerator, parts)
        peak = b2mb(memory.peak)
        peaks[f"epoch-{epoch}"] = peak
        accelerator.print(
            f"epoch {epoch}: {b2mb(memory.begin)} MB before, {peak} MB at the peak, {memory.used} MB kept"
        )
        expect(memory.peak > 0, "no memory was in use")
        bound = args.peak_memory_upper_bound
        expect(bound is None or peak <= bound, f"{peak} MB were in use, and should be at most {bound}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (Path(args.output_dir) / "peak_memory_utilization.json").write_text(json.dumps(peaks))
    accelerator.end_training()


def main() -> None:
    """Reads the command line, and runs."""
    options: dict[str, dict[str, Any]] = {
        "output_dir": pair_training.OUTPUT_DIR,
        "peak_memory_upper_bound": {"type": float, "help": "the most megabytes that may be in use"},
        "n_train": {"type": int, "default": 320, "help": "samples for training"},
        "n_val": {"type": int, "default": 160, "help": "samples for evaluation"},
    }
    training_function(*pair_training.parse(__doc__, 1, **options))


if __name__ == "__main__":
    main()
