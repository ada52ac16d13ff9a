"""Planning and loading big models: this package, the released one, safetensors' own loader and what the machine can do.

    python benchmarks/big_models.py --peer .venv-peer/bin/python                     # half a GiB, on the CPU
    PYTHONPATH=src python3 benchmarks/big_models.py --peer python3 --gib 7.94        # on a machine with a GPU
    ... --out FILE.json                                                              # keep the figures

This file is also the script of its subjects: `--worker` runs with the package that its Python imports. Each of them has
a process of its own, and they take turns. "Cold" asks the system to forget the files before each load. "Used" adds one
look at every page: files that are mapped are read only then. Memory is how much the process grew at most while loading,
by kind: of its own, shared, and mapped files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import interpreter

ROOT = Path(__file__).resolve().parents[1]
SHARDS = 8
WARM, CAST, COLD = "warm files", "warm files, cast to bf16", "cold files"


def decoder(width: int, layers: int) -> Any:
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("query", "key", "value", "out"):
                setattr(self, name, nn.Linear(width, width, bias=False))
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)
            self.norm = nn.LayerNorm(width)

    return nn.Sequential(*[Block() for _ in range(layers)])


def write_checkpoint(folder: Path, width: int, layers: int, dtype: Any) -> None:
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        state = decoder(width, layers).state_dict()
    pattern = (torch.arange(4 * width * width) % 251 - 125).to(dtype)
    names = list(state)
    weight_map = {}
    for number in range(SHARDS):
        shard = names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS]
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {name: pattern[: state[name].numel()].reshape(state[name].shape).clone() for name in shard}
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def forget(folder: Path) -> None:
    """Asks the system to drop the files of a folder from memory."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


@contextmanager
def growth(found: dict[str, int]) -> Iterator[None]:
    """How much memory of each kind this process takes at most beyond what it had, in bytes (Linux)."""
    kinds = {"RssAnon": "own", "RssShmem": "shared", "RssFile": "files"}

    def now() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {kinds[k]: int(v.split()[0]) * 1024 for k, v in (x.split(":", 1) for x in lines) if k in kinds}

    before, stop = now(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.003):
            for kind, size in now().items():
                found[kind] = max(found.get(kind, 0), size - before[kind])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def by_package(folder: Path, device: Any, width: int, layers: int, dtype: Any) -> Callable[[], Any]:
    import torch

    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    def load() -> Any:
        with init_empty_weights():
            model = decoder(width, layers)
        place = {"": 0 if device.type == "cuda" else "cpu"}
        return load_checkpoint_and_dispatch(model, str(folder), device_map=place, dtype=dtype or torch.bfloat16)

    return load


def by_safetensors(folder: Path, device: Any, dtype: Any) -> Callable[[], Any]:
    from safetensors.torch import load_file

    def load() -> Any:
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            found |= load_file(path, device="cuda:0" if device.type == "cuda" else "cpu")
        return {name: value.to(dtype) for name, value in found.items()} if dtype is not None else found

    return load


def by_machine(folder: Path, device: Any) -> Callable[[], Any]:
    """Reads all bytes with many threads, and on a GPU copies as many over: the two at once, each at its own speed."""
    import torch

    paths = sorted(folder.glob("*.safetensors"))
    piece = 16 * 2**20
    pinned = torch.empty(piece, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(piece, dtype=torch.uint8, device=device)
    places = [(path, start) for path in paths for start in range(0, path.stat().st_size, piece)]
    local = threading.local()

    def read(place: tuple[Path, int]) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(piece))
        handle = os.open(place[0], os.O_RDONLY)
        try:
            os.preadv(handle, [local.buffer], place[1])
        finally:
            os.close(handle)

    def load() -> None:
        if device.type == "cuda":
            for _ in places:
                target.copy_(pinned, non_blocking=True)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(read, places))

    return load


def measure_loading(subject: str, folder: Path, width: int, layers: int, rounds: int, kind: str) -> dict[str, Any]:
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if kind == CAST else None
    loads = {
        "ours": lambda: by_package(folder, device, width, layers, dtype),
        "peer": lambda: by_package(folder, device, width, layers, dtype),
        "safetensors": lambda: by_safetensors(folder, device, dtype),
        "machine": lambda: by_machine(folder, device),
    }
    load = loads[subject]()
    times: list[float] = []
    used: list[float] = []
    checks = set()
    for number in range(rounds + 1):
        if kind == COLD:
            forget(folder)
        start = time.perf_counter()
        result = load()
        if device.type == "cuda":
            torch.cuda.synchronize()
        loaded = time.perf_counter() - start
        tensors = result if isinstance(result, dict) else {} if result is None else result.state_dict()
        for value in tensors.values():
            value.view(-1).view(torch.uint8)[::4096].sum().item()
        if number or kind == COLD:  # the first one warms up
            times.append(loaded)
            used.append(time.perf_counter() - start)
        checks.add(sum(float(value.double().sum()) for value in tensors.values()))
        del result, tensors
        if device.type == "cuda":
            torch.cuda.empty_cache()
    memory: dict[str, int] = {}
    with growth(memory):
        load()
    return {"times": times, "used": used, "memory": memory, "sum": sorted(checks), "device": str(device)}


def measure_planning(rounds: int) -> dict[str, Any]:
    from torch import nn

    from accelerate import infer_auto_device_map, init_empty_weights

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(50))

    found: dict[str, Any] = {"build": [], "plan": [], "processor": []}
    for _ in range(rounds):
        start, processor = time.perf_counter(), time.process_time()
        with init_empty_weights():
            model = nn.Sequential(*[Layer() for _ in range(1000)])
        middle = time.perf_counter()
        plan = infer_auto_device_map(model, {"cpu": 400_000_000}, no_split_module_classes=["Layer"])
        found["build"].append(middle - start)
        found["plan"].append(time.perf_counter() - middle)
        found["processor"].append(time.process_time() - processor)
        found["entries"] = len(plan)
        del model
    return found


def ask(python: str, source: str | None, folder: Path, *arguments: Any) -> dict[str, Any]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if source is not None:
        environ["PYTHONPATH"] = source
    command = [python, __file__, "--worker", *map(str, arguments)]
    done = subprocess.run(command, env=environ, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(options: argparse.Namespace) -> None:
    import torch

    layers = max(1, round(options.gib * 2**30 / (24 * options.width**2)))
    source = str(ROOT / "src")
    pythons = {"ours": (sys.executable, source), "peer": (options.peer, None)}
    pythons |= {"safetensors": (sys.executable, None), "machine": (sys.executable, None)}
    results: dict[str, Any] = {"gib": options.gib, "torch": torch.__version__, "cores": os.cpu_count()}
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print("1,000 layers, 100,000 tensors: build without weights, then plan (s)")
        for subject in ("ours", "peer"):
            found = ask(*pythons[subject], folder, "plan", options.rounds)
            results[f"plan {subject}"] = found
            build, plan = (statistics.median(found[part]) for part in ("build", "plan"))
            print(f"  {subject:12} {build:7.3f} + {plan:7.3f} = {build + plan:7.3f}", flush=True)
        for kind, dtype in ((WARM, torch.bfloat16), (COLD, torch.bfloat16), (CAST, torch.float32)):
            if kind == CAST or not (folder / "weights").exists():
                shutil.rmtree(folder / "weights", ignore_errors=True)
                (folder / "weights").mkdir()
                count = layers if dtype == torch.bfloat16 else max(1, layers // 2)
                write_checkpoint(folder / "weights", options.width, count, dtype)
            size = sum(path.stat().st_size for path in (folder / "weights").iterdir())
            print(f"{kind}: {size / 2**30:.2f} GiB in {SHARDS} safetensors files, to the device (s)")
            sums = {}
            for subject in pythons:
                found = ask(
                    *pythons[subject], folder, "load", subject, folder / "weights", options.width, count,
                    options.rounds, kind,
                )  # fmt: skip
                results[f"{kind} {subject}"] = found
                sums[subject] = found["sum"]
                best, middle = min(found["times"]), statistics.median(found["times"])
                used = statistics.median(found["used"])
                memory = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in found["memory"].items())
                print(
                    f"  {subject:12} {middle:7.3f} (best {best:7.3f}), used {used:7.3f}   GiB of host memory: {memory}",
                    flush=True,
                )
            if len({tuple(sums[subject]) for subject in ("ours", "peer", "safetensors")}) != 1:
                raise SystemExit(f"The weights that were loaded are not the same: {sums}")
    finally:
        shutil.rmtree(folder)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


def work(task: str, *arguments: str) -> None:
    if task == "plan":
        print(json.dumps(measure_planning(int(arguments[0]))))
    else:
        subject, folder, width, layers, rounds, kind = arguments
        print(json.dumps(measure_loading(subject, Path(folder), int(width), int(layers), int(rounds), kind)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument(
            "--peer", type=interpreter, default=sys.executable, help="the Python of the released package"
        )
        parser.add_argument("--gib", type=float, default=0.5)
        parser.add_argument("--width", type=int, default=2048)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--folder", help="where the checkpoint is written; the system's own folder by default")
        parser.add_argument("--out")
        main(parser.parse_args())
