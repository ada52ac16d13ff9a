"""The figures of a machine with one NVIDIA GPU: `PYTHONPATH=src python3 benchmarks/gpu.py --out FILE.json`.

The peer is the released version installed for the same python3. This file is also the module of its own two
benchmarks: a step of a transformer of 125 million parameters, and the feeding of batches that are large or have many
tensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import harness
import imports
import report
from harness import Figure
from step import endless, plain_device
from worker import Block

FEEDING = ("compute", "plain", "peer", "ours")
# What the batches come from, besides memory that was pinned beforehand, and how they are asked for.
ORDINARY = {"ready": "pageable", "products": 33}
FEEDS: dict[str, dict[str, Any]] = {
    "113 MB batches, pinned": {},
    "113 MB batches, pinned, non_blocking=True": {"non_blocking": True},
    "113 MB batches, not pinned": ORDINARY,
    "113 MB batches, pin_memory=True": ORDINARY | {"pin_memory": True},
    "113 MB batches, not pinned, dispatched": ORDINARY | {"dispatch": True},
    "1,000 tensors of 16 KB, not pinned": ORDINARY | {"ready": "small"},
    "1,000 tensors of 16 KB, pin_memory=True": ORDINARY | {"ready": "small", "pin_memory": True},
}
SMALL_GPT = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 128, "length": 32, "batch": 2}


def figures() -> list[Figure]:
    found = []
    for precision in ("fp32", "bf16", "fp16"):
        for accumulation in (1, 4):
            args = {"precision": precision, "accumulation": accumulation}
            name = f"step, {precision}, accumulation {accumulation}"
            found.append(Figure(name, "step", "added", 0.25, args, steps=30, rounds=160, seconds=20.0, beside=True))
    for output, text in (("logits", "loss in the loop"), ("both", "loss and logits returned in fp32")):
        name = f"125M transformer, bf16, {text}"
        args = {"task": "gpt", "output": output}
        found.append(Figure(name, "gpu", "baseline", 1.01, args, 1, 4, 4, 16, 18.0))
    for name, args in FEEDS.items():
        args = {"task": "feed", **args}
        found.append(Figure(name, "gpu", "baseline", 1.10, args, 1, 20, 10, 16, 8.0, subjects=FEEDING))
    found.append(Figure("loader, per batch", "loader", "added", None, steps=100, rounds=60, seconds=5.0, beside=True))
    name = "evaluation step with gather_for_metrics"
    found.append(Figure(name, "gather", "added", None, rounds=60, seconds=8.0, beside=True))
    return [dataclasses.replace(figure, restarts=1) for figure in found]


def smoke(figure: Figure) -> Figure:
    """The same code with sizes a CPU gets through in no time."""
    args = dict(figure.args)
    if args.get("task") == "gpt":
        args["sizes"] = SMALL_GPT
    if args.get("task") == "feed":
        args |= {"rows": 64, "width": 32, "products": 2, "tensors": 40}
    return dataclasses.replace(figure, args=args, steps=4, warmup=4, rounds=3)


def plain(task: str, **args: Any) -> Block:
    return plain_gpt(**args) if task == "gpt" else plain_feed(**args)


def prepared(task: str, **args: Any) -> Block:
    return prepared_gpt(**args) if task == "gpt" else prepared_feed(**args)


def compute(task: str, **args: Any) -> Block:
    return compute_alone(**args)


# A transformer of 125 million parameters.


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    length: int = 1024
    batch: int = 16


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        deeper: torch.Tensor = self.mlp(self.before_mlp(x))
        return x + deeper


class GPT(nn.Module):
    """Returns the logits, or, as the models of transformers do, a dict of loss and logits."""

    def __init__(self, sizes: Sizes, output: str) -> None:
        super().__init__()
        self.output = output
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if self.output == "logits":
            return logits
        assert labels is not None
        return {"loss": loss_of(logits, labels), "logits": logits}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def gpt_parts(output: str, sizes: dict[str, int] | None) -> tuple[GPT, DataLoader[Any]]:
    chosen = Sizes(**(sizes or {}))
    torch.manual_seed(0)
    ids = torch.randint(0, chosen.vocabulary, (64 * chosen.batch, chosen.length + 1))
    data = TensorDataset(ids[:, :-1], ids[:, 1:])
    loader = DataLoader(data, batch_size=chosen.batch, pin_memory=torch.cuda.is_available())
    return GPT(chosen, output), loader


def in_fp32(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a prepared model hands out under mixed precision, by hand: the same work on both sides."""
    return {name: value.float() for name, value in outputs.items()}


def plain_gpt(output: str, sizes: dict[str, int] | None = None) -> Block:
    device = plain_device()
    model, loader = gpt_parts(output, sizes)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = endless(loader)

    def block(steps: int) -> None:
        for _ in range(steps):
            ids, labels = next(batches)
            ids, labels = ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model(ids), labels) if output == "logits" else in_fp32(model(ids, labels))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return block


def prepared_gpt(output: str, sizes: dict[str, int] | None = None) -> Block:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model, loader = gpt_parts(output, sizes)
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = endless(loader)

    def block(steps: int) -> None:
        for _ in range(steps):
            ids, labels = next(batches)
            loss = loss_of(net(ids), labels) if output == "logits" else net(ids, labels)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return block


# Large batches.


@dataclasses.dataclass(frozen=True)
class Feed:
    """What batches are, and how they are read and copied.

    ready: "pinned" in memory that was pinned beforehand, since to pin a fresh 113 MB costs the host more than the copy
    to the device; "pageable" in memory as any; "small" the same, as many small tensors in place of a large one.
    """

    ready: str = "pinned"
    pin_memory: bool = False
    dispatch: bool = False
    non_blocking: bool = False
    rows: int = 6912
    width: int = 4096
    products: int = 20
    tensors: int = 1000

    def batches(self, count: int = 4) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        shapes = [(1, self.width)] * self.tensors if self.ready == "small" else [(self.rows, self.width)]
        pinned = self.ready == "pinned" and torch.cuda.is_available()
        made = [[torch.randn(shape) for shape in shapes] for _ in range(count)]
        return [[tensor.pin_memory() for tensor in batch] for batch in made] if pinned else made

    def loader(self) -> DataLoader[Any]:
        pins = torch.cuda.is_available() and (self.pin_memory or self.ready == "pinned")
        return DataLoader(Ready(self.batches()), batch_size=None, pin_memory=pins)

    def work(self, device: torch.device) -> Work:
        return Work(self.rows, self.width, self.products).to(device)


class Ready(Dataset[list[torch.Tensor]]):
    """Batches that lie ready, each time in new tensor objects."""

    def __init__(self, batches: list[list[torch.Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [tensor.view_as(tensor) for tensor in self.batches[index % len(self.batches)]]


class Work(nn.Module):
    """A fixed amount of bf16 products: with 20 of them some 6 ms on an H200, with 33 some 10."""

    weight: torch.Tensor
    start: torch.Tensor

    def __init__(self, rows: int, width: int, products: int) -> None:
        super().__init__()
        weight = torch.randn(width, width, dtype=torch.bfloat16) / width**0.5
        self.register_buffer("weight", weight)
        self.register_buffer("start", torch.randn(rows, width, dtype=torch.bfloat16))
        self.products = products

    @torch.no_grad()
    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        # One large tensor is what is multiplied; of many small ones, all are read.
        h = batch[0].bfloat16() if len(batch) == 1 else self.start + torch.cat(batch).bfloat16().sum()
        for _ in range(self.products):
            h = h @ self.weight
        return h.sum()


def feed_block(batches: Iterator[list[torch.Tensor]], work: Work, device: torch.device, move: dict[str, Any]) -> Block:
    total = torch.zeros((), device=device, dtype=torch.bfloat16)

    def block(steps: int) -> None:
        for _ in range(steps):
            total.add_(work([tensor.to(device, **move) for tensor in next(batches)]))

    return block


def compute_alone(**args: Any) -> Block:
    """The batches lie on the device from the start."""
    device, feed = plain_device(), Feed(**args)
    ready = [[tensor.to(device) for tensor in batch] for batch in feed.batches()]
    return feed_block(endless(ready), feed.work(device), device, {})


def plain_feed(**args: Any) -> Block:
    device, feed = plain_device(), Feed(**args)
    return feed_block(endless(feed.loader()), feed.work(device), device, {"non_blocking": feed.non_blocking})


def prepared_feed(**args: Any) -> Block:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    feed = Feed(**args)
    # Left to itself where nothing is to be dispatched.
    config = DataLoaderConfiguration(non_blocking=feed.non_blocking, dispatch_batches=feed.dispatch or None)
    accelerator = Accelerator(dataloader_config=config)
    loader = accelerator.prepare(feed.loader())
    # The batch is on the device already; the same loop's `.to` then does nothing.
    return feed_block(endless(loader), feed.work(accelerator.device), accelerator.device, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.HERE / "results-gpu.json", help="where the medians go")
    parser.add_argument("--peer", default=sys.executable, help="a python that has the peer installed")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="figures whose name holds any of these")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on CPU, to see that everything runs")
    options = parser.parse_args()
    if not options.cpu_smoke and not torch.cuda.is_available():
        print("No CUDA device was found; use --cpu-smoke to try the code on CPU.", file=sys.stderr)
        return 2
    device = "cpu" if options.cpu_smoke else "cuda"
    who = harness.subjects(options.peer)
    chosen = [f for f in figures() if not options.only or any(text in f.name for text in options.only)]
    if options.cpu_smoke:
        chosen = [smoke(figure) for figure in chosen]
    rows: list[harness.Row] = []
    about: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    # A process that has used CUDA cannot be forked, so every figure has processes of its own. All of them
    # import torch now, side by side, and none touches the GPU before its turn or after it.
    fleets = [{name: harness.World(who[name], 1, device) for name in figure.running} for figure in chosen]
    try:
        for worlds in fleets:
            about |= harness.introduce(worlds)
        for figure, worlds in zip(chosen, fleets, strict=True):
            print(f"{time.monotonic() - began:4.0f} s  {figure.name}", file=sys.stderr, flush=True)
            rows.append(harness.measure(figure, worlds, fork=False))
            for world in worlds.values():
                world.kill()
            # What is measured stays on disk even if a later figure goes wrong.
            report.save(options.out, rows, machine(about, options.cpu_smoke))
    finally:
        for worlds in fleets:
            for world in worlds.values():
                world.kill()
    if not options.only:
        print(f"{time.monotonic() - began:4.0f} s  imports", file=sys.stderr, flush=True)
        rows += imports.measure(who["peer"], who["ours"], rounds=1 if options.cpu_smoke else 2)
    info = machine(about, options.cpu_smoke)
    report.show(rows, info)
    report.save(options.out, rows, info)
    print(f"medians in {options.out}; took {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if any(row.compared == "failed" for row in rows) else 0


def machine(about: dict[str, dict[str, Any]], cpu_smoke: bool) -> dict[str, Any]:
    name = "none: CPU smoke run" if cpu_smoke else torch.cuda.get_device_name()
    return {**report.machine(about), "gpu": name}


if __name__ == "__main__":
    sys.exit(main())
