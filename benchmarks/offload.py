"""Offloaded models, on a machine with one NVIDIA GPU: `PYTHONPATH=src python3 benchmarks/offload.py --json FILE.json`.

A decoder in bf16 whose weights lie in host memory or on disk, one forward of 64 tokens: this package, the released
one (found by the same python3 without PYTHONPATH) and the limit of the machine, which is the bus from page-locked
memory. Each subject runs in a process of its own, on the same weights, and must give the same output to the bit.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness import interpreter

ROOT = Path(__file__).resolve().parent.parent
SHARDS = 8


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm2 = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, inner, width // 128) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def empty_model(options: argparse.Namespace) -> Decoder:
    with torch.device("meta"):
        return Decoder(options.layers, options.width, options.inner, options.vocabulary).to(torch.bfloat16).eval()


def write_weights(options: argparse.Namespace, folder: Path) -> int:
    """The weights in shards; returns their bytes."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = empty_model(options)
    names = list(model.state_dict().items())
    total = sum(tensor.nbytes for _, tensor in names)
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled, index = 0, {}
    for name, tensor in names:
        if filled >= total / SHARDS * len(shards):
            shards.append({})
        scale = tensor.shape[-1] ** -0.5
        value = (
            torch.randn(tensor.shape, device=options.device) * scale if tensor.ndim > 1 else torch.ones(tensor.shape)
        )
        shards[-1][name] = value.to(torch.bfloat16).cpu()
        filled += tensor.nbytes
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return total


def weight_map(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: str(folder / file) for name, file in content["weight_map"].items()}


def in_memory(options: argparse.Namespace, folder: Path) -> Decoder:
    from safetensors.torch import load_file

    model = empty_model(options)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map(folder).values())):
        weights |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    model.load_state_dict(weights, assign=True)
    return model


# ---------------------------------------------------------------------------------------------------- the limit


def timed(function: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def limits() -> dict[str, float]:
    """Bytes per second from host to device, and seconds to lock a GiB."""
    size = 2**30
    out = torch.empty(size, dtype=torch.uint8, device="cuda")
    found = {}
    for name, host in (
        ("pinned", torch.empty(size, dtype=torch.uint8).pin_memory()),
        ("pageable", torch.ones(size, dtype=torch.uint8)),
    ):
        found[f"{name} GB/s"] = (
            size / 1e9 / min(timed(lambda host=host: out.copy_(host, non_blocking=True)) for _ in range(5))
        )
    memory = [torch.ones(2**26, dtype=torch.uint8) for _ in range(64)]
    runtime = torch.cuda.cudart()
    for threads in (1, 4, 8):

        def lock(part: list[torch.Tensor]) -> None:
            for tensor in part:
                assert int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1)) == 0

        workers = [threading.Thread(target=lock, args=(memory[i::threads],)) for i in range(threads)]
        found[f"lock a GiB, {threads} threads, s"] = (
            timed(lambda workers=workers: [*(w.start() for w in workers), *(w.join() for w in workers)]) / 4
        )
        found[f"unlock a GiB, after {threads}, s"] = (
            timed(lambda: [runtime.cudaHostUnregister(tensor.data_ptr()) for tensor in memory]) / 4
        )
    buffer = torch.empty(2**30, dtype=torch.uint8).pin_memory()
    for threads in (1, 4, 8, 16):
        share = 2**30 // threads
        workers = [
            threading.Thread(
                target=ctypes.memmove, args=(buffer.data_ptr() + i * share, memory[0].data_ptr(), min(share, 2**26))
            )
            for i in range(threads)
        ]
        seconds = timed(lambda workers=workers: [*(w.start() for w in workers), *(w.join() for w in workers)])
        found[f"memcpy to pinned, {threads} threads, GB/s"] = threads * min(share, 2**26) / 1e9 / seconds
        found[f"read to pinned, {threads} threads, GB/s"] = threads * min(share, 2**26) / 1e9 / reading(buffer, threads)
    return found


def reading(buffer: torch.Tensor, threads: int) -> float:
    """Seconds in which as many threads read 64 MiB each, or as much as fits, of a warm file."""
    share = min(buffer.nbytes // threads, 2**26)
    views = [memoryview(buffer[i * share : (i + 1) * share].numpy()) for i in range(threads)]
    with tempfile.NamedTemporaryFile(dir=OPTIONS.folder) as file:
        file.write(bytes(threads * share))
        file.flush()
        workers = [
            threading.Thread(target=os.preadv, args=(file.fileno(), [view], i * share)) for i, view in enumerate(views)
        ]
        return timed(lambda: [*(w.start() for w in workers), *(w.join() for w in workers)])


# ------------------------------------------------------------------------------------------------- the subjects


def forwards(model: nn.Module, options: argparse.Namespace) -> dict[str, Any]:
    """The first forward, the median of the others, memory on the device, and the output."""
    tokens = torch.arange(64, device=options.device)[None] % options.vocabulary
    on_gpu = options.device != "cpu"
    times = []
    output = torch.empty(0)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(options.rounds):

            def step() -> None:
                nonlocal output
                output = model(tokens)

            times.append(timed(step))
    found: dict[str, Any] = {
        "first forward": times[0],
        "forward": sorted(times[1:])[len(times[1:]) // 2],
        "all forwards": times,
        "output": hashlib.sha256(output.float().cpu().numpy().tobytes()).hexdigest()[:16],
    }
    if on_gpu:
        found["peak MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        found["peak reserved MiB"] = torch.cuda.max_memory_reserved() / 2**20
        found["left MiB"] = (torch.cuda.memory_allocated() - before) / 2**20
    return found


def run_cpu(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from accelerate import cpu_offload

    model = in_memory(options, folder)
    setup = timed(lambda: cpu_offload(model, options.device))
    found = {"setup": setup, **forwards(model, options)}
    return {**found, "again": forwards(model, options)["forward"]}


def run_disk(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from accelerate import disk_offload

    model = in_memory(options, folder)
    target = tempfile.mkdtemp(dir=folder)
    try:
        setup = timed(lambda: disk_offload(model, target, options.device))
        return {"setup": setup, **forwards(model, options)}
    finally:
        shutil.rmtree(target)


def run_safetensors(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The layers on disk where the checkpoint has them, the rest on the device; nothing is written."""
    from safetensors import safe_open

    from accelerate import dispatch_model

    model = empty_model(options)
    files = weight_map(folder)
    for name in ("embed.weight", "norm.weight", "head.weight"):
        with safe_open(files[name], "pt", device=options.device) as file:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, nn.Parameter(file.get_tensor(name)))
    index = {
        name: {"safetensors_file": file, "weight_name": name, "dtype": "bfloat16"}
        for name, file in files.items()
        if name.startswith("layers.")
    }
    device: Any = 0 if options.device == "cuda" else options.device
    places = {"embed": device, "layers": "disk", "norm": device, "head": device}
    setup = timed(lambda: dispatch_model(model, places, main_device=device, offload_index=index))
    return {"setup": setup, **forwards(model, options)}


def run_load(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """From the checkpoint's files to a model whose layers lie on disk."""
    from accelerate import load_checkpoint_and_dispatch

    model = empty_model(options)
    device: Any = 0 if options.device == "cuda" else options.device
    places = {"embed": device, "layers": "disk", "norm": device, "head": device}
    target = tempfile.mkdtemp(dir=folder)
    try:
        setup = timed(
            lambda: load_checkpoint_and_dispatch(model, str(folder), device_map=places, offload_folder=target)
        )
        written = sum(file.stat().st_size for file in Path(target).rglob("*"))
        return {"setup": setup, "written MiB": written / 2**20, **forwards(model, options)}
    finally:
        shutil.rmtree(target)


TASKS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "cpu": run_cpu,
    "disk": run_disk,
    "safetensors": run_safetensors,
    "load": run_load,
}


def subject(name: str, task: str, folder: Path) -> dict[str, Any]:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if name == "ours":
        environ["PYTHONPATH"] = str(ROOT / "src")
    arguments = [*sys.argv[1:], "--worker", task, "--folder", str(folder)]
    python = sys.executable if name == "ours" else OPTIONS.peer
    done = subprocess.run([python, __file__, *arguments], env=environ, stdout=subprocess.PIPE, text=True, cwd=folder)
    if done.returncode:
        return {"failed": done.returncode}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(task: str, ours: dict[str, Any], peer: dict[str, Any], floor: float) -> None:
    print(f"\n{task}: floor {floor:.3f} s")
    for key, value in ours.items():
        other = peer.get(key, "-")
        if isinstance(value, float):
            ratio = f"   {other / value:6.2f} x" if isinstance(other, float) and value else ""
            share = f"   {floor / value:.0%} of the limit" if key in ("forward", "again") else ""
            shown = f"{other:10.3f}" if isinstance(other, float) else f"{other:>10}"
            print(f"  {key:18} ours {value:10.3f}   peer {shown}{ratio}{share}")
    if "failed" in ours or "failed" in peer:
        print(f"  failed: ours {ours.get('failed')}, peer {peer.get('failed')}")
    elif ours["output"] != peer["output"]:
        print(f"  OUTPUTS DIFFER: ours {ours['output']}, peer {peer['output']}")
    print(f"  forwards: ours {[round(t, 3) for t in ours.get('all forwards', [])]}", flush=True)
    print(f"            peer {[round(t, 3) for t in peer.get('all forwards', [])]}", flush=True)


def main() -> None:
    device = OPTIONS.device
    if OPTIONS.worker is not None:
        import accelerate

        found = TASKS[OPTIONS.worker](OPTIONS, Path(OPTIONS.folder))
        print(json.dumps({**found, "version": accelerate.__version__}))
        return
    folder = Path(tempfile.mkdtemp(dir=OPTIONS.folder))
    try:
        results: dict[str, Any] = {"limits": limits() if device == "cuda" else {}}
        for key, value in results["limits"].items():
            print(f"{key:40} {value:8.3f}")
        total = write_weights(OPTIONS, folder)
        floor = total / 1e9 / results["limits"].get("pinned GB/s", float("inf"))
        results |= {"GiB": total / 2**30, "floor": floor}
        print(f"{total / 2**30:.2f} GiB of weights", flush=True)
        for task in OPTIONS.tasks:
            peer = subject("peer", task, folder) if OPTIONS.peer else {}
            ours = subject("ours", task, folder)
            results[task] = {"ours": ours, "peer": peer}
            show(task, ours, peer, floor)
        if OPTIONS.json:
            Path(OPTIONS.json).write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(folder)


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """What is offloaded, from where, and how often."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--vocabulary", type=int, default=26000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", default=None, help="where to write; by default the folder for temporary files")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_size_options(parser)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--peer", type=interpreter, default=sys.executable, help="a python that has the released package; '' for none"
    )
    parser.add_argument("--json", default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()
    main()
