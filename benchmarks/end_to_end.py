"""A whole training three times: by hand as an expert writes it, with the released version, and with this package.

    PYTHONPATH=src python3 benchmarks/end_to_end.py --out FILE.json      # on a machine with an NVIDIA GPU

A decoder of 1.2 billion parameters reads a tokenised file in sequences of 4096, in bf16, with a fused AdamW and
compiled blocks. It logs every 10 steps. Every 50 it evaluates, and saves a checkpoint: in the background where it can.
Each is a process of its own, one after the other; the peer is the released version installed for the same python3.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpu import GPT, Sizes
from harness import REPOSITORY, subjects

LARGE = Sizes(layers=22, width=2048, heads=16, vocabulary=32768, length=4096, batch=4)
SMALL = Sizes(layers=2, width=64, heads=2, vocabulary=128, length=32, batch=2)
PEAK = 989e12  # operations per second in bf16 that NVIDIA promises of an H100 or H200, without sparsity
LOG, PAUSE, EVALUATED = 10, 50, 4  # steps between two logs; steps between two pauses; batches of an evaluation
NAMES = ("plain", "peer", "ours")


class Tokens(Dataset[torch.Tensor]):
    """Sequences of a file of 16-bit tokens, each with one token more than it is long."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = index * self.length
        return torch.from_numpy(self.tokens[begin : begin + self.length + 1].astype(np.int64))


def write_tokens(path: Path, sizes: Sizes, sequences: int) -> None:
    """Text with something to learn: most tokens follow from the one before them."""
    draws = np.random.default_rng(0)
    steps = np.where(
        draws.random(sequences * sizes.length + 1) < 0.9, 7, draws.integers(1, 97, sequences * sizes.length + 1)
    )
    (np.cumsum(steps) % sizes.vocabulary).astype(np.uint16).tofile(path)


class Decoder(GPT):
    """Returns its loss, so that no logits are kept or cast outside of it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, "logits")

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Parts:
    """What the three trainings have in common; each says how it goes about the rest."""

    model: Any
    optimizer: Any
    scheduler: Any
    training: Any
    evaluation: Any
    device: torch.device
    backward: Callable[[torch.Tensor], None]
    clip: Callable[[], Any]
    forward_context: Callable[[], AbstractContextManager[Any]]
    mean: Callable[[list[torch.Tensor]], float]
    log: Callable[[dict[str, float], int], None]
    save: Callable[[Path], Any]
    finish: Callable[[], None]


def materials(
    options: argparse.Namespace,
) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any], DataLoader[Any]]:
    sizes = SMALL if options.cpu_smoke else LARGE
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cpu" if options.cpu_smoke else "cuda"
    model = Decoder(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    data = Tokens(options.folder / "tokens.bin", sizes.length)
    training, evaluation = torch.utils.data.random_split(
        data, [len(data) - EVALUATED * sizes.batch, EVALUATED * sizes.batch], torch.Generator().manual_seed(0)
    )
    how: dict[str, Any] = {"batch_size": sizes.batch, "pin_memory": not options.cpu_smoke}
    workers: dict[str, Any] = {} if options.cpu_smoke else {"num_workers": 2, "persistent_workers": True}
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(training, shuffle=True, drop_last=True, generator=order, **how, **workers)
    return model, optimizer, scheduler, loader, DataLoader(evaluation, **how)


def by_hand(options: argparse.Namespace) -> Parts:
    model, optimizer, scheduler, training, evaluation = materials(options)
    device = next(model.parameters()).device
    if not options.cpu_smoke:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile()
    saver = ExpertSaver(model, optimizer, scheduler)
    logged = open(options.folder / "plain.jsonl", "w")  # noqa: SIM115

    def log(values: dict[str, float], step: int) -> None:
        logged.write(json.dumps({"step": step, **values}) + "\n")
        logged.flush()

    return Parts(
        model,
        optimizer,
        scheduler,
        training,
        evaluation,
        device,
        backward=lambda loss: loss.backward(),
        clip=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        forward_context=lambda: torch.autocast(device.type, torch.bfloat16),
        mean=lambda losses: torch.stack(losses).mean().item(),
        log=log,
        save=saver.save,
        finish=saver.finish,
    )


class ExpertSaver:
    """Copies everything into pinned memory that is kept, and writes it from a thread."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self._state = lambda: {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        self._host: dict[int, torch.Tensor] = {}
        self._thread: threading.Thread | None = None

    def save(self, folder: Path) -> None:
        self.finish()
        numbers = iter(range(10**9))
        copied = self._copied(self._state(), numbers)
        ready = torch.cuda.Event() if torch.cuda.is_available() else None
        if ready is not None:
            ready.record()
        self._thread = threading.Thread(target=self._write, args=(copied, folder, ready))
        self._thread.start()

    def _copied(self, value: Any, numbers: Iterator[int]) -> Any:
        if isinstance(value, torch.Tensor):
            number = next(numbers)
            if number not in self._host:
                self._host[number] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            return self._host[number].copy_(value, non_blocking=True)
        if isinstance(value, dict):
            return {key: self._copied(item, numbers) for key, item in value.items()}
        return [self._copied(item, numbers) for item in value] if isinstance(value, list) else value

    def _write(self, state: Any, folder: Path, ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            ready.synchronize()
        draft = folder.with_suffix(".draft")
        with open(draft, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(folder)

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()


def prepared(options: argparse.Namespace) -> Parts:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    plugin = None if options.cpu_smoke else TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = Accelerator(
        cpu=options.cpu_smoke,
        mixed_precision="bf16",
        dynamo_plugin=plugin,
        log_with=None if options.worker == "peer" else "local",
        project_dir=str(options.folder),
    )
    accelerator.init_trackers("end_to_end")
    model, optimizer, scheduler, training, evaluation = accelerator.prepare(*materials(options))
    logged = open(options.folder / "peer.jsonl", "w")  # noqa: SIM115

    def log(values: dict[str, float], step: int) -> None:
        if options.worker == "peer":  # which has no tracker of its own that works without another package
            logged.write(json.dumps({"step": step, **values}) + "\n")
            logged.flush()
        else:
            accelerator.log(values, step=step)

    behind: dict[str, Any] = {} if options.worker == "peer" else {"async_save": True}
    return Parts(
        model,
        optimizer,
        scheduler,
        training,
        evaluation,
        accelerator.device,
        backward=accelerator.backward,
        clip=lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        forward_context=nullcontext,
        mean=lambda losses: accelerator.gather_for_metrics(torch.stack(losses)).mean().item(),
        log=log,
        save=lambda folder: accelerator.save_state(str(folder), **behind),
        finish=accelerator.end_training,
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def batches(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def train(options: argparse.Namespace) -> dict[str, Any]:
    parts = by_hand(options) if options.worker == "plain" else prepared(options)
    sizes = SMALL if options.cpu_smoke else LARGE
    feed = batches(parts.training)
    losses: list[float] = []
    times: list[
        float
    ] = []  # of a step, as a mean over the steps between two logs, in which the host waits for the device
    pauses: dict[str, list[float]] = {"evaluation": [], "save": []}
    began = last = 0.0
    total = torch.zeros((), device=parts.device)
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            evaluate(parts)  # its compilation belongs to the warm-up
            synchronize(parts.device)
            began = last = time.perf_counter()
        with parts.forward_context():
            loss = parts.model(next(feed).to(parts.device, non_blocking=True))
        parts.backward(loss)
        parts.clip()
        parts.optimizer.step()
        parts.scheduler.step()
        parts.optimizer.zero_grad()
        total += loss.detach()
        done = step + 1 - options.warmup
        if step >= options.warmup and done % LOG == 0:
            losses.append(total.item() / LOG)
            times.append((time.perf_counter() - last) / LOG)
            parts.log({"loss": losses[-1]}, done)
            total.zero_()
            last = time.perf_counter()
        if step >= options.warmup and done % options.pause == 0:
            start = time.perf_counter()
            parts.log({"evaluation": evaluate(parts)}, done)
            middle = time.perf_counter()
            parts.save(options.folder / f"{options.worker}_{done}")
            last = time.perf_counter()
            pauses["evaluation"].append(middle - start)
            pauses["save"].append(last - middle)
        if step < options.warmup:
            total.zero_()
    synchronize(parts.device)
    seconds = time.perf_counter() - began
    start = time.perf_counter()
    parts.finish()
    finishing = time.perf_counter() - start
    tokens = options.steps * sizes.batch * sizes.length
    weights = sum(parameter.numel() for parameter in parts.model.parameters())
    operations = 6 * weights + 6 * sizes.layers * sizes.width * sizes.length  # of a token, attention causal
    step_time = statistics.median(times)
    return {
        "weights": weights,
        "tokens per second, all in": tokens / seconds,
        "tokens per second of a step": sizes.batch * sizes.length / step_time,
        "share of the peak": operations * sizes.batch * sizes.length / step_time / PEAK,
        "peak memory, GiB": torch.cuda.max_memory_allocated() / 2**30 if parts.device.type == "cuda" else 0.0,
        "stop for a save, s": pauses["save"],
        "evaluation, s": pauses["evaluation"],
        "rest of the last save, s": finishing,
        "loss": [round(loss, 4) for loss in losses],
    }


def evaluate(parts: Parts) -> float:
    parts.model.eval()
    with torch.no_grad(), parts.forward_context():
        losses = [parts.model(batch.to(parts.device, non_blocking=True)).detach() for batch in parts.evaluation]
    parts.model.train()
    mean = parts.mean(losses)
    assert math.isfinite(mean)
    return mean


def show(results: dict[str, dict[str, Any]]) -> None:
    print(f"{next(iter(results.values()))['weights'] / 1e9:.2f} billion parameters")
    for key in next(iter(results.values())):
        if key in ("weights", "loss"):
            continue
        cells = []
        for result in results.values():
            value = result[key]
            cells.append(", ".join(f"{v:.2f}" for v in value) if isinstance(value, list) else f"{value:.4g}")
        print(f"{key:32}" + "".join(f"{cell:>18}" for cell in cells))
    for name, result in results.items():
        print(f"loss, {name}: {result['loss'][0]} to {result['loss'][-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable, help="a python that has the peer installed")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--pause", type=int, default=PAUSE, help="steps between two evaluations and saves")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    parser.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on CPU, to see that everything runs")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(train(options)))
        return
    results: dict[str, dict[str, Any]] = {}
    sizes = SMALL if options.cpu_smoke else LARGE
    who = subjects(options.peer)
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            write_tokens(Path(folder) / "tokens.bin", sizes, 512)
            env = who[name].environment("cpu" if options.cpu_smoke else "cuda")
            command = [
                who[name].python,
                str(Path(__file__).resolve()),
                *sys.argv[1:],
                "--worker",
                name,
                "--folder",
                folder,
            ]
            began = time.perf_counter()
            done = subprocess.run(command, env=env, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{name} ended with code {done.returncode}")
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name} took {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
