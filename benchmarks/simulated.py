"""Ranks as threads over a store and a process group that only count: for numbers of ranks that no machine here has.

What runs is the package itself: `Accelerator`, its communicator with all that it packs into messages, the files of a
checkpoint, the watch for hangs, the agreement to stop. Replaced are the store behind `default_store` and
`own_connection`, and the functions of torch.distributed that the communicator calls.

A world has all its ranks, or some of them: rank 0, the first rank of another machine, and one that is no first rank.
These two then speak for the missing ones of their kind: what they bring to an exchange, write to the store and put into
a checkpoint is there again under the number of each.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from accelerate import devices
from accelerate.accelerator import first_backward
from accelerate.checkpoint import agreement, layout, save
from accelerate.checkpoint.layout import Manifest
from accelerate.comm import torch_dist
from accelerate.devices import CPU, Choice
from accelerate.diagnosis import arrival, place, roll, watch
from accelerate.environments import World
from accelerate.per_rank import ranks_are_threads
from accelerate.state import lost, partial, stopping
from accelerate.strategies import STRATEGIES, StrategyRow
from accelerate.tracking import local

# Where a store is asked for by name.
ASKS_FOR_STORE = (agreement, first_backward, lost, local)
ASKS_FOR_CONNECTION = ((agreement, "kept_connection"), (watch, "own_connection"), (stopping, "own_connection"))
STORE = ("set", "get", "add", "check", "wait", "compare_set")


class Ledger:
    """What one rank has done, by phase: how many of each, and how many bytes."""

    def __init__(self) -> None:
        self.phase = "start"
        self.counts: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()

    def enter(self, phase: str) -> None:
        with self._lock:
            self.phase = phase
            self.counts.setdefault(phase, Counter())  # also one in which nothing is done

    def note(self, what: str, size: int = 0) -> None:
        with self._lock:
            here = self.counts.setdefault(self.phase, Counter())
            here[what] += 1
            if size:
                here[f"{what} bytes"] += size


class CountedStore:
    """A store whose use is noted. A question that is asked again is a "poll", whose number depends on time."""

    def __init__(self, inner: Any, ledger: Ledger) -> None:
        self._inner = inner
        self._ledger = ledger
        self._asked: set[Any] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in STORE:
            return value

        def call(*args: Any) -> Any:
            asks = name in ("check", "wait") or (name == "add" and args[1] == 0)
            question = (name, str(args)) if asks else None
            again = asks and question in self._asked
            self._asked.add(question)
            self._ledger.note("store poll" if again else f"store {name}", len(pickle.dumps(args)))
            return value(*args)

        return call


class FakeStore:
    """A store in memory, as it looks to all ranks. spoken_for: for each rank that there is, those it speaks for."""

    def __init__(self, spoken_for: dict[int, list[int]]) -> None:
        self.spoken_for = spoken_for
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


class SeenBy:
    """A `FakeStore`, as one rank uses it."""

    timeout = timedelta(minutes=5)

    def __init__(self, store: FakeStore, rank: int, prefix: str = "") -> None:
        self._store = store
        self._rank = rank
        self._prefix = prefix

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: Any) -> None:
        value = value if isinstance(value, bytes) else value.encode()
        with self._store.changed:
            self._store.values[self._key(key)] = value
            if key.endswith(end := f"/{self._rank}"):
                for other in self._store.spoken_for[self._rank]:
                    self._store.values[self._key(f"{key.removesuffix(end)}/{other}")] = value
            self._store.changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        with self._store.changed:
            amount *= 1 + len(self._store.spoken_for[self._rank])
            found = int(self._store.values.get(self._key(key), b"0")) + amount
            self._store.values[self._key(key)] = str(found).encode()
            self._store.changed.notify_all()
            return found

    def check(self, keys: list[str]) -> bool:
        with self._store.changed:
            return all(self._key(key) in self._store.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timeout) -> None:
        own = [self._key(key) for key in keys]
        with self._store.changed:
            seconds = min(timeout.total_seconds(), threading.TIMEOUT_MAX)
            if not self._store.changed.wait_for(lambda: all(key in self._store.values for key in own), seconds):
                raise RuntimeError(f"wait timeout for {keys}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.values[self._key(key)]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self._store.changed:
            old = self._store.values.get(self._key(key))
            if (old or b"").decode() == expected:
                self.set(key, value)
        return self._store.values.get(self._key(key), expected.encode())


class Room:
    """Where the ranks that there are bring something, and see what each has brought."""

    def __init__(self, spoken_for: dict[int, list[int]]) -> None:
        self.brought: list[Any] = [None] * (len(spoken_for) + sum(map(len, spoken_for.values())))
        self._result: Any = None
        self._combine: Callable[[list[Any]], Any] = list
        self._spoken_for = spoken_for
        self._meet = threading.Barrier(len(spoken_for), self._fill, timeout=600)
        self._leave = threading.Barrier(len(spoken_for), timeout=600)

    def _fill(self) -> None:
        for speaker, others in self._spoken_for.items():
            for rank in others:
                self.brought[rank] = echoed(self.brought[speaker], speaker, rank)
        self._result = self._combine(self.brought)

    def exchange(self, rank: int, value: Any, combine: Callable[[list[Any]], Any] = list) -> Any:
        """What `combine` makes of the values of all, made once."""
        self.brought[rank] = value
        self._combine = combine
        self._meet.wait()
        found = self._result
        self._leave.wait()
        return found

    def abort(self) -> None:
        self._meet.abort()
        self._leave.abort()


class CountedDist:
    """torch.distributed, whose collectives are noted on the rank that calls them."""

    COLLECTIVES = ("all_reduce", "broadcast", "scatter", "barrier", "broadcast_object_list", "all_gather_object")

    def __init__(self, inner: Any, ledger: Callable[[], Ledger]) -> None:
        self._inner = inner
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self.COLLECTIVES:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            size = args[0].nbytes if args and isinstance(args[0], torch.Tensor) else 0
            if name == "broadcast_object_list":
                size = len(pickle.dumps(args[0])) if self.get_rank() == kwargs.get("src", 0) else 0
            self._ledger().note(name, size)
            return value(*args, **kwargs)

        return call

    def gather_on(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`all_gather_on`, noted."""

        def counted(group: Any) -> Any:
            gather = make(group)

            def call(outs: list[torch.Tensor], tensor: torch.Tensor) -> Any:
                self._ledger().note("all_gather", len(outs) * tensor.nbytes)
                return gather(outs, tensor)

            return call

        return counted

    def gather_large(self, gather: Any) -> Any:
        def call(out: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
            self._ledger().note("all_gather", out.nbytes)
            gather(out, tensor, group=group)

        return call


class _Group:
    """The group of all, as one of its ranks has it."""


class FakeDist:
    """What the communicator calls of torch.distributed, between threads."""

    ProcessGroup, ReduceOp, DistStoreError = torch.distributed.ProcessGroup, torch.distributed.ReduceOp, RuntimeError

    def __init__(self, world: Simulated) -> None:
        self._world = world
        self._groups: dict[int, _Group] = {}

    @property
    def group(self) -> SimpleNamespace:
        return SimpleNamespace(WORLD=self._groups.setdefault(self.get_rank(), _Group()))

    def get_rank(self) -> int:
        return self._world.rank

    def get_world_size(self) -> int:
        return self._world.size

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return False

    def init_process_group(self, **options: Any) -> None:
        """Nothing to make."""

    def get_backend_config(self) -> str:
        return "cpu:gloo"

    def _exchange(self, value: Any, combine: Callable[[list[Any]], Any] = list) -> Any:
        return self._world.room.exchange(self.get_rank(), value, combine)

    def barrier(self) -> None:
        self._exchange(None)

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        def combine(values: list[torch.Tensor]) -> torch.Tensor:
            together = torch.stack(values)
            if op in (None, self.ReduceOp.SUM):
                return together.sum(0)
            return together.amin(0) if op == self.ReduceOp.MIN else together.amax(0)

        tensor.copy_(self._exchange(tensor.clone(), combine))

    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: Any = None) -> None:
        tensor.copy_(self._exchange(tensor.clone())[src])

    def broadcast_object_list(self, values: list[Any], src: int = 0, group: Any = None) -> None:
        mine = pickle.dumps(values) if self.get_rank() == src else b""
        values[:] = pickle.loads(self._exchange(mine)[src])

    def all_gather_on(self, group: Any) -> Any:
        def gather(outs: list[torch.Tensor], tensor: torch.Tensor) -> Callable[[], None]:
            together = torch.empty(len(outs), len(tensor), dtype=torch.uint8)
            self.all_gather(together.view(-1), tensor)
            for out, part in zip(outs, together, strict=True):
                out.copy_(part)
            return lambda: None

        return gather

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
        joined = self._exchange(bytes(tensor.numpy()), b"".join)
        out.copy_(torch.frombuffer(bytearray(joined), dtype=torch.uint8))


class _Device(CPU):
    def __init__(self, world: Simulated) -> None:
        super().__init__()
        self._world = world

    def join(self, world: World, options: dict[str, Any], attempt: int = 0) -> Any:
        rank, size, local = self._world.rank, self._world.size, self._world.local_size
        placed = World(rank, size, local_rank=rank % local, local_size=min(local, size), started_by="torchrun")
        return super().join(placed, options, attempt)


class UnstartedWatch(watch.HangWatch):
    """The looks are taken by whoever simulates, with a time of their own."""

    def start(self) -> None:
        seen.watch = self


class _Seen(threading.local):
    """What the looks of a rank see: its watch, how many collectives have begun, and where it is."""

    watch: Any = None
    begun = 0
    place: Any = None


seen = _Seen()
_places = SimpleNamespace(
    signature=lambda thread: (seen.place.line,), place_of=lambda thread, stack=False: seen.place, at_line=place.at_line
)


@contextmanager
def counting(
    ledger: Callable[[], Ledger], dist: Any, all_gather_on: Any, all_gather: Any, store: Any, connection: Any
) -> Iterator[None]:
    """A context in which what ranks tell each other is noted. The arguments are what they do it through."""
    counted = CountedDist(dist, ledger)
    read, hook = Manifest.read, sys.excepthook

    def reading(folder: Path) -> Any:
        path = Path(folder) / layout.MANIFEST
        if path.is_file():
            ledger().note("manifest read", path.stat().st_size)
        return read(folder)

    replaced: list[tuple[Any, str, Any]] = [
        *((module, "default_store", store) for module in ASKS_FOR_STORE),
        *((module, name, connection) for module, name in ASKS_FOR_CONNECTION),
        (torch_dist, "dist", counted),
        (torch_dist, "all_gather_on", counted.gather_on(all_gather_on)),
        (torch_dist, "_all_gather", counted.gather_large(all_gather)),
        (arrival, "watched", lambda world, attempt: nullcontext()),  # all are there at once
        (watch, "HangWatch", UnstartedWatch),
        (watch, "stop", lambda: None),
        (watch, "collectives_begun", lambda: seen.begun),
        (watch, "place", _places),
        (Manifest, "read", staticmethod(reading)),
        (roll.Notes, "_knock", lambda notes: ledger().note("store connection")),
        (partial, "_share_the_cores", lambda *args: None),
    ]
    # What DDP exchanges is torch's, and the same with or without this package.
    plain = StrategyRow("accelerate.strategies.base", "Strategy", lambda state: True)
    STRATEGIES.insert(0, plain)
    try:
        with ExitStack() as stack:
            for change in replaced:
                stack.enter_context(patch.object(*change))
            yield
    finally:
        STRATEGIES.remove(plain)
        sys.excepthook = hook
        lost._watch = watch._watch = None


def echoed(value: Any, speaker: int, rank: int) -> Any:
    """What one rank has brought, as a missing one would have: files have its number in their names."""
    if not isinstance(value, bytes):
        return value
    return value.replace(b"_%d." % speaker, b"_%0*d." % (len(str(speaker)), rank))


class Simulated:
    """A world of threads. threads: whether every rank is one. local_size: ranks of one machine."""

    def __init__(self, size: int, threads: bool = True, local_size: int = 8) -> None:
        self.size = size
        self.local_size = local_size
        self.spoken_for: dict[int, list[int]] = {rank: [] for rank in range(size)}
        if not threads:
            first = max(size - local_size, 0) // local_size * local_size  # whose number is as long as any
            self.spoken_for = {0: [], first: [], first + 1: []}
            for rank in set(range(size)) - set(self.spoken_for):
                self.spoken_for[first if rank % local_size == 0 else first + 1].append(rank)
        self.ledgers = {rank: Ledger() for rank in self.spoken_for}
        self.room = Room(self.spoken_for)
        self._store = FakeStore(self.spoken_for)
        self._rank = threading.local()

    @property
    def rank(self) -> int:
        return int(self._rank.value)

    @property
    def ledger(self) -> Ledger:
        return self.ledgers[self.rank]

    def store(self, prefix: str = "") -> CountedStore:
        return CountedStore(SeenBy(self._store, self.rank, prefix), self.ledger)

    def connection(self, timeout: Any, prefix: str = "") -> CountedStore:
        self.ledger.note("store connection")
        return self.store(prefix)

    def _writing(self, write_parts: Any) -> Any:
        """Writes the parts of a rank, and the files of those it speaks for."""

        def write(parts: Any, folder: Path, group: Any = None) -> Any:
            entries = write_parts(parts, folder, group)
            for name in entries:
                for rank in self.spoken_for[self.rank]:
                    shutil.copyfile(folder / name, folder / str(echoed(name.encode(), self.rank, rank).decode()))
            return entries

        return write

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """A context in which the package meets this world."""
        fake = FakeDist(self)
        device = Choice(_Device(self), None, "simulated")
        replaced = [
            (save, "write_parts", self._writing(save.write_parts)),
            (partial, "are_ranks_threads", lambda: False),
            (devices, "choose", lambda *args: device),
            (stopping, "_store", self._stop_store),
        ]
        ranks_are_threads()
        try:
            with counting(lambda: self.ledger, fake, fake.all_gather_on, fake.all_gather, self.store, self.connection):
                with ExitStack() as stack:
                    for change in replaced:
                        stack.enter_context(patch.object(*change))
                    yield
        finally:
            ranks_are_threads(False)

    def _stop_store(self, state: Any) -> Any:
        if self.size == 1:
            return None
        return stopping.Store(self.connection(None), self.connection(None), "stop", self.rank, self.size)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on every rank that there is, with the ledger of the rank; what each has returned."""
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self._rank.value = rank
            try:
                results[rank] = function(self.ledger, *args)
            except BaseException as error:
                errors.append(error)
                self.room.abort()

        with self._in_place():
            threads = [threading.Thread(target=work, args=(rank,), name=f"rank-{rank}") for rank in self.spoken_for]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [results[rank] for rank in self.spoken_for]
