"""A step of ZeRO beside the same loop with `deepspeed.initialize` by hand, of this package and of the peer.

    python benchmarks/zero.py                                           # two CPU processes; the peer refuses a CPU
    python3 benchmarks/zero.py --device cuda --peer python3 --out zero.json   # one GPU

The loop by hand runs in the processes of the others, in turn with them. `--path` names folders with packages that all
of them need, as deepspeed, where it is not installed. DeepSpeed's log is off.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import harness
import report
from harness import Figure
from step import endless
from worker import Block

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ON_A_CPU = [(1, "fp32", 1), (2, "fp32", 1), (2, "fp32", 4), (2, "bf16", 1), (3, "fp32", 1)]
ON_A_GPU = [(0, "bf16", 1), (1, "bf16", 1), (2, "bf16", 1), (2, "fp16", 1), (2, "bf16", 4), (3, "bf16", 1)]


def figures(device: str, seconds: float) -> list[Figure]:
    cpu = device == "cpu"
    found = []
    for stage, precision, accumulation in ON_A_CPU if cpu else ON_A_GPU:
        name = f"ZeRO {stage}, {precision}" + (f", accumulation {accumulation}" if accumulation > 1 else "")
        args = {"stage": stage, "precision": precision, "accumulation": accumulation}
        args |= {"width": 256, "batch": 32} if cpu else {"width": 1024, "batch": 64}
        subjects = ("plain", "ours") if cpu else ("plain", "peer", "ours")
        # Many short blocks in turn: what disturbs a machine for a while then disturbs both loops alike.
        sizes = {"steps": 5, "warmup": 20, "rounds": 1000, "seconds": seconds, "restarts": 1}
        sizes["processes"] = 2 if cpu else 1
        found.append(Figure(name, "zero", "baseline", 1.02, args, **sizes, subjects=subjects, beside=True))
    return found


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(4)), nn.Linear(width, 16))


def loader(width: int, batch: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    samples = 256 * batch
    data = TensorDataset(torch.randn(samples, width), torch.randint(0, 16, (samples,)))
    return DataLoader(data, batch_size=batch, pin_memory=torch.cuda.is_available())


def config(stage: int, precision: str, accumulation: int, batch: int) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
        "zero_allow_untested_optimizer": True,
    }


def set_up() -> None:
    """A world of one process, where there is none; and no words, which take time."""
    if "RANK" not in os.environ:
        os.environ.update(harness.rank_environment(0, 1, harness.free_port()))
    logging.disable(logging.WARNING)


def plain(stage: int, precision: str, accumulation: int, width: int, batch: int) -> Block:
    set_up()
    import deepspeed

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl")
    model = network(width)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config=config(stage, precision, accumulation, batch),
    )
    dtype = DTYPES[precision]
    batches = endless(loader(width, batch))

    def block(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            x, y = x.to(device, dtype, non_blocking=True), y.to(device, non_blocking=True)
            loss = F.cross_entropy(engine(x).float(), y)
            engine.backward(loss)
            engine.step()

    return block


def prepared(stage: int, precision: str, accumulation: int, width: int, batch: int) -> Block:
    set_up()
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=config(stage, precision, accumulation, batch), zero3_init_flag=False)
    accelerator = Accelerator(mixed_precision="no" if precision == "fp32" else precision, deepspeed_plugin=plugin)
    net = network(width)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    model, optimizer, data = accelerator.prepare(net, optimizer, loader(width, batch))
    dtype = DTYPES[precision]
    batches = endless(data)

    def block(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x.to(dtype)).float(), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return block


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peer", default=sys.executable, help="a python that has the peer installed, for a GPU")
    parser.add_argument("--path", default="", help="what is put on the path of all")
    parser.add_argument("--seconds", type=float, default=15.0, help="that one row may take")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows whose name holds any of these")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    options = parser.parse_args()
    chosen = [
        f
        for f in figures(options.device, options.seconds)
        if not options.only or any(t in f.name for t in options.only)
    ]
    os.environ.setdefault("DS_ACCELERATOR", options.device)
    who = harness.subjects(harness.interpreter(options.peer))
    paths = [os.path.abspath(path) for path in options.path.split(os.pathsep) if path]
    sys.path += paths  # where the version of DeepSpeed is looked up
    for name in ("peer", "ours"):
        one = who[name]
        who[name] = dataclasses.replace(one, pythonpath=os.pathsep.join([*filter(None, [one.pythonpath]), *paths]))
    rows: list[harness.Row] = []
    about: dict[str, Any] = {}
    began = time.monotonic()
    # What DeepSpeed keeps of a process is not meant for a second engine of another kind: each row has its own.
    fleets = [
        {name: harness.World(who[name], figure.processes, options.device) for name in figure.running}
        for figure in chosen
    ]
    try:
        for figure, worlds in zip(chosen, fleets, strict=True):
            about |= harness.introduce(worlds)
            print(f"{time.monotonic() - began:4.0f} s  {figure.name}", file=sys.stderr, flush=True)
            rows.append(harness.measure(figure, worlds, fork=False))
            for world in worlds.values():
                world.kill()
            if options.out is not None:
                report.save(options.out, rows, _machine(about, options.device))
    finally:
        for worlds in fleets:
            for world in worlds.values():
                world.kill()
    report.show(rows, _machine(about, options.device))
    for row in rows:
        if within := row.raw.get("ratio_is_within"):
            rounds, (low, high) = row.raw["rounds"], within
            print(f"{row.name}: {row.compared} in {rounds} rounds, surely between {low:.3f} and {high:.3f}")
    return 1 if any(row.compared == "failed" for row in rows) else 0


def _machine(about: dict[str, Any], device: str) -> dict[str, Any]:
    from importlib.metadata import version

    name = torch.cuda.get_device_name() if device == "cuda" else "none"
    return {**report.machine(about), "gpu": name, "deepspeed": version("deepspeed")}


if __name__ == "__main__":
    sys.exit(main())
