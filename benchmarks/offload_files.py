"""From files to a GPU: what each step can do, and ways to put them together (two minutes on a machine with one GPU).

    PYTHONPATH=src python3 benchmarks/offload_files.py                       # all of it; 7.94 GiB of weights
    PYTHONPATH=src python3 benchmarks/offload_files.py --only variants       # one table alone
    PYTHONPATH=src python benchmarks/offload_files.py --layers 8 --width 1024 --inner 4096 --vocabulary 1000   # no GPU

Tables: how fast many threads bring files in the page cache into buffers, alone and while the bus is busy; whether the
pages of a mapped file can be locked, so that the bus reads them where they are; forwards of a model whose layers lie in
safetensors files, with the way of the package and with others; and a simulation, in which reads and the bus take as
long as they are told, of what the package itself loses between them. Without a GPU the first and the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from accelerate.big_modeling import cuda_copier, staging
from accelerate.big_modeling.slot import Slot
from accelerate.big_modeling.store import FileRange
from offload import add_size_options, run_safetensors, timed, weight_map, write_weights

MIB = 2**20
PORTABLE, READ_ONLY = 1, 8  # flags of cudaHostRegister
POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14


# ------------------------------------------------------------------------------------- files into buffers of the host


def read(path: str, start: int, buffer: np.ndarray[Any, Any]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.preadv(handle, [buffer.data], start)
    finally:
        os.close(handle)


@functools.cache
def mapping(path: str) -> np.memmap[Any, Any]:
    return np.memmap(path, dtype=np.uint8, mode="c")


def copy_mapped(path: str, start: int, buffer: np.ndarray[Any, Any]) -> None:
    ctypes.memmove(buffer.ctypes.data, mapping(path).ctypes.data + start, len(buffer))


def through_buffers(files: list[str], threads: int, part: int, fill: Callable[..., None], locked: bool) -> float:
    """Seconds in which threads bring all bytes of the files into two buffers each."""
    places = iter(
        [(f, s, min(part, os.path.getsize(f) - s)) for f in files for s in range(0, os.path.getsize(f), part)]
    )
    guard = threading.Lock()
    buffers = [[torch.ones(part, dtype=torch.uint8) for _ in range(2)] for _ in range(threads)]
    arrays = [[(b.pin_memory() if locked else b).numpy() for b in pair] for pair in buffers]

    def work(own: list[np.ndarray[Any, Any]]) -> None:
        turn = 0
        while True:
            with guard:
                place = next(places, None)
            if place is None:
                return
            turn = 1 - turn
            fill(place[0], place[1], own[turn][: place[2]])

    workers = [threading.Thread(target=work, args=(own,)) for own in arrays]
    return timed(lambda: [*(w.start() for w in workers), *(w.join() for w in workers)])


@contextlib.contextmanager
def busy_bus(device: str) -> Iterator[None]:
    """Copies from locked memory to the device, all the time."""
    if device == "cpu":
        yield
        return
    stop = threading.Event()
    host, out = (
        torch.ones(64 * MIB, dtype=torch.uint8).pin_memory(),
        torch.empty(64 * MIB, dtype=torch.uint8, device=device),
    )

    def copy() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                out.copy_(host, non_blocking=True)
                stream.synchronize()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def show_reading(files: list[str], options: argparse.Namespace) -> None:
    total = sum(map(os.path.getsize, files)) / 1e9
    on_gpu = options.device != "cpu"
    print(f"\nfiles in the page cache into {'locked ' if on_gpu else ''}buffers, GB/s (in brackets: with a busy bus)")
    ways = {"pread": read, "memcpy from a mapping": copy_mapped}
    timed(
        lambda: through_buffers(files, 4, 4 * MIB, copy_mapped, on_gpu)
    )  # the faults of the mapping are its first use's
    for name, fill in ways.items():
        for threads in (8, 16, 24) if on_gpu else (1, 2, 4):
            for part in (4, 16):
                alone = total / through_buffers(files, threads, part * MIB, fill, on_gpu)
                with busy_bus(options.device):
                    beside = total / through_buffers(files, threads, part * MIB, fill, on_gpu)
                print(f"  {name:24} {threads:3} threads, {part:2} MiB   {alone:7.1f} ({beside:.1f})", flush=True)


# ------------------------------------------------------------------------------------------------ pages of mapped files

# Name: how the file is opened, how it is mapped, and the flags with which its pages are locked.
LOCKS: dict[str, tuple[int, int, int, int]] = {
    "shared, read only": (os.O_RDONLY, mmap.MAP_SHARED, mmap.PROT_READ, PORTABLE | READ_ONLY),
    "shared, read only, no flag": (os.O_RDONLY, mmap.MAP_SHARED, mmap.PROT_READ, PORTABLE),
    "private, read only": (os.O_RDONLY, mmap.MAP_PRIVATE, mmap.PROT_READ, PORTABLE | READ_ONLY),
    "shared, writable": (os.O_RDWR, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, PORTABLE),
    # Locked for writing, each page becomes a copy of the process's own.
    "private, writable": (os.O_RDONLY, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, PORTABLE),
}


class LockedFile:
    """A file mapped in one of these ways, its pages locked. refused: the answer of CUDA where they are not."""

    def __init__(self, path: str, kind: str) -> None:
        opened, shared, protection, flags = LOCKS[kind]
        handle = os.open(path, opened)
        try:
            self.map = mmap.mmap(handle, 0, flags=shared, prot=protection)
        finally:
            os.close(handle)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        with contextlib.suppress(OSError):
            self.map.madvise(POPULATE_READ)
        found: list[int] = []
        size = -(-len(self.bytes) // mmap.PAGESIZE) * mmap.PAGESIZE

        def lock() -> None:  # in a thread of its own: a refusal stays behind as the last error of the thread
            found.append(int(torch.cuda.cudart().cudaHostRegister(self.bytes.ctypes.data, size, flags)))

        thread = threading.Thread(target=lock)
        thread.start()
        thread.join()
        self.refused = found[0]

    def tensor(self, place: FileRange) -> torch.Tensor:
        raw = self.bytes[place.offset : place.offset + place.nbytes]
        return torch.from_numpy(raw).view(place.dtype).view(place.shape)

    def close(self) -> None:
        if not self.refused:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.ctypes.data)


def own_memory() -> int:
    return next(
        int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")
    )


def show_locking(files: list[str]) -> list[str]:
    """Which kinds work."""
    print("\npages of a mapped file, locked where they are")
    size = os.path.getsize(files[0])
    expected = torch.from_numpy(np.fromfile(files[0], dtype=np.uint8)).cuda()
    out = torch.empty_like(expected)
    works = []
    for kind in LOCKS:
        before = own_memory()
        began = time.perf_counter()
        try:
            file = LockedFile(files[0], kind)
        except OSError as error:
            print(f"  {kind:28} cannot be mapped: {error}")
            continue
        seconds = (time.perf_counter() - began) * 2**30 / size
        grown = (own_memory() - before) * 1024
        if file.refused:
            print(f"  {kind:28} refused with CUDA error {file.refused}", flush=True)
            continue
        host = torch.from_numpy(file.bytes)
        rate = size / 1e9 / min(timed(lambda host=host: out.copy_(host, non_blocking=True)) for _ in range(4))
        same = torch.equal(out, expected)
        works += [kind] if same else []
        print(
            f"  {kind:28} {seconds:.3f} s for each GiB, then {rate:.1f} GB/s to the device, {grown / size:.0%} copied, "
            f"{'right' if same else 'WRONG'}",
            flush=True,
        )
        del host
        file.close()
    return works


# ------------------------------------------------------------------------------------------------------------ variants


class MappedFile(staging._File):
    """Reads a file by copying from a mapping of it, which stays from one forward to the next."""

    def __init__(self, place: FileRange, handle: int) -> None:
        super().__init__(place, handle)
        self._start = mapping(place.path).ctypes.data + place.offset

    def fill(self, buffer: Any, start: int, size: int) -> None:
        ctypes.memmove(buffer.address, self._start + start, size)


@contextlib.contextmanager
def staged(
    part: int = staging.PART, readers: int = staging.READERS, buffers: int = 2, source: Any = staging._File
) -> Iterator[None]:
    """Through buffers of the host."""
    stager = functools.partial(staging.Stager, part=part, readers=readers)
    with mock.patch.object(cuda_copier, "Stager", stager), mock.patch.object(staging, "_BUFFERS", buffers):
        with mock.patch.object(staging, "_File", source):
            yield


@contextlib.contextmanager
def instead(tensor: Callable[[FileRange], torch.Tensor]) -> Iterator[None]:
    """Weights in files are taken for tensors in memory."""
    original = Slot.source

    def source(slot: Slot) -> torch.Tensor | FileRange:
        found = original(slot)
        return tensor(found) if isinstance(found, FileRange) else found

    with mock.patch.object(Slot, "source", source):
        yield


@contextlib.contextmanager
def locked_files(kind: str) -> Iterator[None]:
    """Straight from the locked pages of the mapped files."""
    files: dict[str, LockedFile] = {}
    tensors: dict[FileRange, torch.Tensor] = {}

    def tensor(place: FileRange) -> torch.Tensor:
        if place.path not in files:
            files[place.path] = LockedFile(place.path, kind)
        if place not in tensors:
            tensors[place] = files[place.path].tensor(place)
        return tensors[place]

    try:
        with instead(tensor):
            yield
    finally:
        torch.cuda.synchronize()
        tensors.clear()
        for file in files.values():
            file.close()


@contextlib.contextmanager
def locked_copies() -> Iterator[None]:
    """From copies of the weights in locked memory, made when each of them is first used."""
    copies: dict[FileRange, torch.Tensor] = {}

    def tensor(place: FileRange) -> torch.Tensor:
        if place not in copies:
            copies[place] = place.mapped().pin_memory()
        return copies[place]

    with instead(tensor):
        yield


def variants(works: list[str]) -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
    return {
        "as it is": staged,
        "parts of 2 MiB": lambda: staged(part=2 * MIB),
        "parts of 8 MiB": lambda: staged(part=8 * MIB),
        "8 readers": lambda: staged(readers=8),
        "24 readers": lambda: staged(readers=24),
        "4 buffers each": lambda: staged(buffers=4),
        "from a mapping": lambda: staged(source=MappedFile),
        "from a mapping, 8 MiB": lambda: staged(part=8 * MIB, source=MappedFile),
        "from a mapping, 24 readers": lambda: staged(readers=24, source=MappedFile),
        **{f"locked file ({kind})": lambda kind=kind: locked_files(kind) for kind in works},
        "locked copies": locked_copies,
        "as it is, again": staged,
    }


def show_variants(folder: Path, works: list[str], options: argparse.Namespace) -> dict[str, Any]:
    print("\nforwards with all layers in safetensors files: the first, then the others (s)")
    results: dict[str, Any] = {}
    for name, variant in variants(works).items():
        with variant():
            found = run_safetensors(options, folder)
            gc.collect()  # the threads of its copier end
        results[name] = found
        later = found["all forwards"][1:]
        right = found["output"] == results["as it is"]["output"]
        print(
            f"  {name:40} {found['first forward']:.3f}   median {found['forward']:.3f}, best {min(later):.3f}"
            f"   peak {found.get('peak MiB', 0):.0f} MiB{'' if right else '   WRONG OUTPUT'}",
            flush=True,
        )
    return results


# ---------------------------------------------------------------------------------------------------------- simulation


class Clock:
    """A bus that only takes time: what is sent is over as soon as it would have arrived."""

    class Mark:
        when = 0.0

        def synchronize(self) -> None:
            time.sleep(max(0.0, self.when - time.perf_counter()))

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._guard = threading.Lock()

    def enter(self) -> None:
        """Nothing to do."""

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, out: torch.Tensor, buffer: torch.Tensor, mark: Any) -> None:
        with self._guard:
            self._free = max(self._free, time.perf_counter()) + buffer.numel() / self._rate
            mark.when = self._free

    def mark(self) -> Any:
        mark = self.Mark()
        mark.when = self._free
        return mark


def simulate(reading: float, part: int, readers: int, ahead: int, bus: float = 55e9) -> tuple[float, float]:
    """Seconds of a forward with 20 layers of the size of the benchmark's, and what it would take without any loss."""

    class Sleeping(staging._Memory):
        def fill(self, buffer: Any, start: int, size: int) -> None:
            time.sleep(size * readers / reading)

    sizes = [size * MIB for _ in range(20) for size in (32, 32, 32, 32, 86, 86, 86)]
    memory = torch.empty(max(sizes), dtype=torch.uint8)
    times = []
    with mock.patch.object(staging, "_Memory", Sleeping):
        stager = staging.Stager(Clock(bus), part=part, readers=readers)
        for _ in range(3):
            began, jobs = time.perf_counter(), []
            for number in range(len(sizes)):
                while len(jobs) <= min(number + ahead, len(sizes) - 1):
                    jobs.append(stager.bring([(memory[: sizes[len(jobs)]], memory[: sizes[len(jobs)]])]))
                jobs[number].over.wait()
            jobs[-1].mark.synchronize()
            times.append(time.perf_counter() - began)
        stager.close()
    return min(times), max(sum(sizes) / bus, sum(sizes) / reading)


def show_simulation() -> None:
    print("\nsimulated: a forward of 8.1 GB over a bus of 55 GB/s with 16 readers (s, and share of what is possible)")
    for reading in (20e9, 33e9, 55e9):
        for part in (2, 4, 8):
            row = [simulate(reading, part * MIB, 16, ahead) for ahead in (2, 4)]
            shown = "   ".join(f"{seconds:.3f} {best / seconds:4.0%}" for seconds, best in row)
            print(
                f"  reading at {reading / 1e9:2.0f} GB/s, parts of {part} MiB, 2 and 4 blocks ahead: {shown}",
                flush=True,
            )


# ---------------------------------------------------------------------------------------------------------------- main

TABLES = ("reading", "locking", "variants", "simulation")


def main(options: argparse.Namespace) -> None:
    on_gpu = options.device != "cpu"
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    results: dict[str, Any] = {}
    try:
        if set(options.only) != {"simulation"}:
            total = write_weights(options, folder)
            print(f"{total / 2**30:.2f} GiB of weights", flush=True)
            files = sorted(set(weight_map(folder).values()))
        if "reading" in options.only:
            show_reading(files, options)
        works: list[str] = []
        if on_gpu and {"locking", "variants"} & set(options.only):
            works = show_locking(files)
        if on_gpu and "variants" in options.only:
            results = show_variants(folder, works, options)
        if "simulation" in options.only:
            show_simulation()
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size_options(parser)
    parser.add_argument("--only", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--json", default=None, help="keep the figures of the variants")
    main(parser.parse_args())
