"""fp8 against bf16 on a GPU: `PYTHONPATH=src:TORCHAO python3 benchmarks/fp8.py --out FILE.json`.

A stack of wide linear layers, by hand and through an Accelerator, in turns; then a decoder of a billion parameters
that learns to write as the source files of Python's standard library do, in bf16 and in fp8 on the same batches.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AORecipeKwargs, TorchDynamoPlugin

STACK = {"width": 4096, "hidden": 16384, "pairs": 4, "tokens": 8192}
DECODER = {"width": 3072, "heads": 24, "layers": 8, "vocabulary": 16384, "length": 4096, "batch": 4}
SMALL_STACK = {"width": 64, "hidden": 128, "pairs": 2, "tokens": 64}
SMALL_DECODER = {"width": 64, "heads": 2, "layers": 3, "vocabulary": 512, "length": 64, "batch": 2}


def reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- the stack --------------------------------------------------------------------------------------------------


def stack(sizes: dict[str, int]) -> nn.Module:
    torch.manual_seed(0)
    pair = (sizes["width"], sizes["hidden"]), (sizes["hidden"], sizes["width"])
    return nn.Sequential(*[nn.Linear(*shape, bias=False) for _ in range(sizes["pairs"]) for shape in pair])


def every_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


def by_hand(sizes: dict[str, int], device: torch.device, *, fp8: bool, backend: str) -> Callable[[torch.Tensor], Any]:
    model = stack(sizes).to(device)
    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
        convert_to_float8_training(model, config=config)
    compiled: Any = torch.compile(model, backend=backend)

    def step(x: torch.Tensor) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = compiled(x)
        out.sum().backward()
        model.zero_grad()

    return step


def prepared(sizes: dict[str, int], device: torch.device, *, mode: str, backend: str) -> Callable[[torch.Tensor], Any]:
    reset()
    handlers: Any = [AORecipeKwargs(module_filter_func=every_layer)] if mode == "fp8" else []
    accelerator = Accelerator(
        mixed_precision=mode, dynamo_plugin=TorchDynamoPlugin(backend=backend), kwargs_handlers=handlers
    )
    model = accelerator.prepare(stack(sizes))

    def step(x: torch.Tensor) -> None:
        accelerator.backward(model(x).sum())
        model.zero_grad()

    return step


def time_stack(sizes: dict[str, int], device: torch.device, backend: str, rounds: int) -> dict[str, Any]:
    x = torch.randn(sizes["tokens"], sizes["width"], device=device)
    subjects = {
        "bf16 by hand": by_hand(sizes, device, fp8=False, backend=backend),
        "fp8 by hand": by_hand(sizes, device, fp8=True, backend=backend),
        "bf16, Accelerator": prepared(sizes, device, mode="bf16", backend=backend),
        "fp8, Accelerator": prepared(sizes, device, mode="fp8", backend=backend),
    }
    for name, step in subjects.items():
        began = time.monotonic()
        for _ in range(3):
            step(x)
        wait()
        print(f"  {name}: ready after {time.monotonic() - began:.1f} s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(rounds):
        for name in list(subjects)[:: 1 if turn % 2 else -1]:
            wait()
            began = time.perf_counter()
            for _ in range(5):
                subjects[name](x)
            wait()
            times[name].append((time.perf_counter() - began) / 5 * 1000)
    found = {name: round(statistics.median(values), 3) for name, values in times.items()}
    ratios = {}
    for mode in ("bf16", "fp8"):
        pairs = zip(times[f"{mode}, Accelerator"], times[f"{mode} by hand"], strict=True)
        ratios[f"{mode}: Accelerator / by hand"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 4)
    speed = round(found["bf16, Accelerator"] / found["fp8, Accelerator"], 3)
    return {"sizes": sizes, "ms": found, "ratios": ratios, "fp8 is faster by": speed}


# --- the decoder ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        width = sizes["width"]
        self.tokens = nn.Embedding(sizes["vocabulary"], width)
        self.places = nn.Embedding(sizes["length"], width)
        self.blocks = nn.ModuleList(Block(width, sizes["heads"]) for _ in range(sizes["layers"]))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes["vocabulary"], bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def text(vocabulary: int, length: int, rows: int) -> torch.Tensor:
    """Source files of the standard library as words: the most frequent ones by number, all others as 0."""
    folder = Path(os.__file__).parent
    files = sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
    words: list[str] = []
    for path in files:
        if len(words) > rows * length:
            break
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            words += re.findall(r"\w+|[^\w\s]|\n *| +", path.read_text(errors="replace"))
    common = [word for word, _ in collections.Counter(words).most_common(vocabulary - 1)]
    number = {word: place + 1 for place, word in enumerate(common)}
    tokens = torch.tensor([number.get(word, 0) for word in words])
    rows = min(rows, len(tokens) // length)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return tokens[: rows * length].view(rows, length)[order]


def train_decoder(sizes: dict[str, int], data: torch.Tensor, mode: str, steps: int, backend: str) -> dict[str, Any]:
    reset()
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
    accelerator = Accelerator(mixed_precision=mode, dynamo_plugin=plugin)
    torch.manual_seed(0)
    with accelerator.device:
        model = Decoder(sizes)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, weight_decay=0.1, fused=accelerator.device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rows, batch = len(data), sizes["batch"]
    losses, times = [], []
    for step in range(steps):
        start = step * batch % (rows - batch + 1)
        tokens = data[start : start + batch].to(accelerator.device)
        wait()
        began = time.perf_counter()
        loss = model(tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        wait()
        times.append((time.perf_counter() - began) * 1000)
        losses.append(loss.item())
        if step in (0, 1, 2, 9) or step % 50 == 49:
            print(f"  {mode}, step {step + 1}: loss {losses[-1]:.4f}, {times[-1]:.0f} ms", flush=True)
    kept = statistics.median(times[steps // 4 :])
    return {
        "ms": round(kept, 2),
        "tokens per second": round(batch * (data.shape[1] - 1) / kept * 1000),
        "loss at first": round(losses[0], 4),
        "loss": round(statistics.fmean(losses[-20:]), 4),
        "losses": [round(loss, 4) for loss in losses[::10]],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def compare_decoders(sizes: dict[str, int], steps: int, backend: str) -> dict[str, Any]:
    # One word more than is read: each is the target of the one before it.
    data = text(sizes["vocabulary"], sizes["length"] + 1, steps * sizes["batch"])
    print(f"  {len(data)} rows of {data.shape[1]} words", flush=True)
    found: dict[str, Any] = {"sizes": sizes, "steps": steps}
    for mode in ("bf16", "fp8"):
        found[mode] = train_decoder(sizes, data, mode, steps, backend)
    found["fp8 is faster by"] = round(found["bf16"]["ms"] / found["fp8"]["ms"], 3)
    found["loss of fp8 / bf16"] = round(found["fp8"]["loss"] / found["bf16"]["loss"], 5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--steps", type=int, default=200, help="steps of the decoder")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the stack")
    parser.add_argument("--tiny", action="store_true", help="small models, on any machine: does it run?")
    parser.add_argument("--only", choices=("stack", "decoder"))
    args = parser.parse_args()
    device = Accelerator(cpu=args.tiny).device
    backend = "eager" if args.tiny else "inductor"
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "Python": sys.version.split()[0]}
    if args.only != "decoder":
        print("stack", flush=True)
        found["stack"] = time_stack(SMALL_STACK if args.tiny else STACK, device, backend, args.rounds)
        print(json.dumps(found["stack"], indent=1), flush=True)
        torch.compiler.reset()
        wait()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.only != "stack":
        print("decoder", flush=True)
        found["decoder"] = compare_decoders(SMALL_DECODER if args.tiny else DECODER, args.steps, backend)
        print(json.dumps(found["decoder"], indent=1), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
