"""Several processes through torch.distributed: gloo, NCCL and the vendors' backends."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import memmove
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from accelerate.comm.base import Communicator
from accelerate.comm.tree import dtype_name, in_words
from accelerate.environments import World, torchrun
from accelerate.errors import DistributedOperationException
from accelerate.torch_internals.process_groups import all_gather_on

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

# The same collective under two names: torch renamed it in 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MOST_KNOWN = 1024


class Joined(NamedTuple):
    """The process group that this process is in: whom it is with, and the name of the backend."""

    world: World
    backend: str


class _Told(NamedTuple):
    """What a rank says of its tensors.

    header: as it is sent. nbytes: of all; -1 unless they are in the memory of the host. what: all that counts of it for
    the next message.
    """

    header: bytes
    nbytes: int
    what: tuple[int, int, int]


def join(world: World, kind: str, backend: str, options: dict[str, Any], attempt: int = 0) -> Joined | None:
    """Join the process group of `world`, or find the one that the script has made; None where a process is alone.

    kind, backend: the device type that the processes compute on, and what they talk through there.
    options: for `init_process_group`. attempt: how many groups this process has left before.
    """
    if not dist.is_available():
        return None
    if dist.is_initialized():
        return Joined(_world_of_group() if world.size == 1 else world, str(dist.get_backend()))
    # A launcher that was asked for one GPU still gets a process group, as scripts rely on it being there.
    if world.size == 1 and not ("LOCAL_RANK" in os.environ and kind != "cpu"):
        return None
    from accelerate.comm import connections
    from accelerate.diagnosis import arrival

    options = dict(options)
    elsewhere = "init_method" in options or "store" in options
    asked = options.pop("backend", None)
    attempts = (torchrun.attempt(os.environ), attempt)
    if "init_method" in options:
        # Only env:// finds these by itself.
        options = {"rank": world.rank, "world_size": world.size, **options}
    elif attempts != ("0", 0):
        options = {**_store_of_attempt(attempts, world), **options}
    if world.started_by != "torchrun":
        # The script's other libraries read these too, as they would under torchrun.
        os.environ.update(world.variables())
    if asked is None and kind != "cpu" and backend != "gloo":
        # gloo beside it for what lives on the host: sizes, flags, objects
        options = {"backend": f"cpu:gloo,{kind}:{backend}", **options}
    shows_errors = sys.excepthook
    try:
        waits = nullcontext() if elsewhere else arrival.watched(world, "{}-{}".format(*attempts))
        with waits, connections.remembered(None if "init_method" in options else world.port):
            dist.init_process_group(**{"backend": asked or backend, **options})
            if "gloo" in str(dist.get_backend_config()):
                # A process that leaves at once would break the connections that a slower one is still making.
                dist.all_reduce(torch.zeros(1))
        if attempt:  # torch wraps it for every group, so that lines would have the rank in front as often
            sys.excepthook = shows_errors
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"Rank {world.rank} of {world.size} could not meet the others at {world.address}:{world.port} in time: "
            "check that all ranks were started, that MASTER_ADDR and MASTER_PORT are the same on all of them and "
            "reachable, or give them longer with `InitProcessGroupKwargs(timeout=...)`."
        ) from error
    return Joined(world, str(asked or backend))


def has_group() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def join_alone(kind: str, backend: str) -> str:
    """Make a process group of this process alone, for an engine that does nothing without one; returns its backend."""
    if not dist.is_initialized():
        name = backend if kind == "cpu" or backend == "gloo" else f"cpu:gloo,{kind}:{backend}"
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    return backend


def _world_of_group() -> World:
    """The world of a group that the script made by itself, taken for one machine where nothing says otherwise."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reason = "the script has initialized the process group"
    return World(rank, size, local_rank=rank, local_size=size, started_by="script", reason=reason)


def _store_of_attempt(attempt: tuple[str, int], world: World) -> dict[str, Any]:
    """Arguments for joining once more: after torch elastic has started all ranks again, or after a group was ended.

    The store may be that of the attempt before, and hold the addresses of processes or sockets that are gone.
    """
    store, rank, size = next(dist.rendezvous("env://", world.rank, world.size))
    return {"store": dist.PrefixStore("attempt_{}_{}".format(*attempt), store), "rank": rank, "world_size": size}


class TorchDistributed(Communicator):
    def __init__(self, device: torch.device) -> None:
        from accelerate.comm.messages import messages_of  # which a process alone has no use for

        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self.device = device
        # Where CPU tensors go: the main group (None), or a gloo group beside one of NCCL alone.
        takes_host = _has_backend(torch.device("cpu"))
        self._host_group: dist.ProcessGroup | None = None if takes_host else dist.new_group(backend="gloo")
        self._side_group: dist.ProcessGroup | None = None
        self._on_device = device.type != "cpu" and _has_backend(device)
        self.fast_device: torch.device | None = device if self._on_device else None
        self._exchange = all_gather_on(self._host_group)
        self._messages = messages_of(self._host_group or dist.group.WORLD, self.size)
        self._known: dict[Any, _Told] = {}

    def _place(self, tensor: torch.Tensor) -> tuple[torch.Tensor, dist.ProcessGroup | None]:
        """The tensor where a collective can take it, and the group to use there."""
        if tensor.device.type == "cpu":
            return tensor, self._host_group
        if self._on_device and tensor.device.type == self.device.type:
            return tensor, None
        return tensor.cpu(), self._host_group

    def barrier(self) -> None:
        if self._on_device and self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index or 0])
        else:
            dist.barrier()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        placed, group = self._place(tensor)
        carrier = placed.int() if placed.dtype is torch.int16 else placed  # which no backend adds up
        dist.all_reduce(carrier, op=_OPS[op], group=group)
        return tensor if carrier is tensor else tensor.copy_(carrier)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        placed, group = self._place(tensor.detach())
        carrier = _solid(placed)
        dist.broadcast(_bytes(carrier), src=source, group=group)
        if carrier.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(carrier)
        return tensor

    def scatter(self, out: torch.Tensor, parts: list[torch.Tensor] | None, source: int = 0) -> None:
        dist.scatter(out, parts, src=source, group=self._place(out)[1])

    def gather_objects(self, value: Any) -> list[Any]:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        (gathered,), (lengths,) = self._gather([content], 1)
        return [pickle.loads(part.numpy().data) for part in gathered.split(lengths)]

    def side_channel(self) -> tuple[Callable[[Any], list[Any]], Any]:
        if self._side_group is None:
            # What goes on behind the training may wait for a slow disk: a day, not half an hour.
            self._side_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        group = self._side_group

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value, group=group)
            return values

        return gather, group

    def broadcast_objects(self, values: list[Any], source: int = 0) -> None:
        dist.broadcast_object_list(values, src=source, group=self._host_group)

    def gather(self, tensors: list[torch.Tensor], keys: tuple[str | int, ...] = ()) -> list[torch.Tensor]:
        limit = self._messages.most_tensors
        if len(tensors) > limit:
            # The first message tells how many there are in all, so that nobody waits for more than the others bring.
            first = self._gather(tensors[:limit], len(tensors), keys)[0]
            return first + self.gather(tensors[limit:])
        return self._gather(tensors, len(tensors), keys)[0]

    def _gather(
        self, tensors: list[torch.Tensor], total: int, keys: tuple[str | int, ...] = ()
    ) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Tensors of all ranks, and their lengths by tensor and rank. total: how many this rank is going to bring."""
        # One message per rank says what the rank brings and, if it fits, already carries it. Larger tensors follow in
        # collectives whose sizes all ranks then know.
        tensors = [_one_dim_at_least(tensor) for tensor in tensors]
        told = self._told(tensors, total, keys)
        message = self._messages.next
        small = 0 <= told.nbytes <= message.room
        # By address: to call torch takes longer than to move so little.
        memmove(message.head, told.header, len(told.header))
        if small:
            address = message.address
            for tensor in tensors:
                size = tensor.nbytes
                memmove(address, tensor.data_ptr(), size)
                address += size
        wait = self._exchange(message.received, message.sent)
        # Nearly always all ranks bring the same: what is done with it is prepared while this one waits for the others.
        lengths = [[tensor.shape[0]] * self.size for tensor in tensors]
        outs, moves = _unpacking(tensors, lengths, message.places) if small else ([], [])
        wait()
        if _all_say(told.header, message.headers):
            self._messages.gathered(told.what)
        else:
            headers = [np.frombuffer(header, np.int64).tolist() for header in message.headers]
            first, sizes = headers[0], [header[1] for header in headers]
            room = self._messages.room_for(-1 if min(sizes) < 0 else max(sizes))
            self._messages.gathered((first[0], first[2], room))
            if any(header[0] != total or header[2] != first[2] for header in headers):
                self._raise_mismatch(tensors, total - len(tensors), keys)
            lengths = [[header[i] for header in headers] for i in range(3, 3 + len(tensors))]
            small = min(sizes) >= 0 and max(sizes) <= message.room
            outs, moves = _unpacking(tensors, lengths, message.places) if small else ([], [])
        if small:
            for move in moves:
                memmove(*move)
            return outs, lengths
        return [self._gather_large(tensor, sizes) for tensor, sizes in zip(tensors, lengths, strict=True)], lengths

    def _told(self, tensors: list[torch.Tensor], total: int, keys: tuple[str | int, ...]) -> _Told:
        """What this rank says of its tensors."""
        look = (total, keys, *[(tensor.dtype, tensor.shape, tensor.is_cpu) for tensor in tensors])
        found = self._known.get(look)
        if found is None:
            size = sum(tensor.nbytes for tensor in tensors) if all(tensor.is_cpu for tensor in tensors) else -1
            kind = zlib.crc32(repr((keys, [(tensor.dtype, tensor.shape[1:]) for tensor in tensors])).encode())
            header = np.array([total, size, kind, *map(len, tensors)], np.int64).tobytes()
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[look] = _Told(header, size, (total, kind, self._messages.room_for(size)))
        return found

    def _raise_mismatch(self, tensors: list[torch.Tensor], more: int, keys: tuple[str | int, ...]) -> None:
        mine = [(dtype_name(tensor), list(tensor.shape)) for tensor in tensors]
        told = self.gather_objects((mine, more, keys))
        if len({own for _, _, own in told}) > 1:
            raise DistributedOperationException(
                "Cannot gather tensors under keys that differ between ranks: "
                + "; ".join(
                    f"rank {rank} has {shown}" for rank, shown in enumerate(_differing([k for _, _, k in told]))
                )
                + ". Pass the same keys, in the same order, on every rank, or gather them as objects."
            )
        everyone = [(brought, left) for brought, left, _ in told]
        raise DistributedOperationException(
            "Cannot gather tensors whose dtypes, or shapes beyond the first dimension, differ between ranks: "
            + "; ".join(f"rank {rank} has {in_words(*brought)}" for rank, brought in enumerate(everyone))
            + f". {_remedy(everyone)}, or gather them as objects."
        )

    def _gather_large(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        placed, group = self._place(tensor)
        longest, even = max(sizes), min(sizes) == max(sizes)
        if not even:
            padded = torch.empty((longest, *placed.shape[1:]), dtype=placed.dtype, device=placed.device)
            padded[: len(placed)] = placed
            placed = padded
        # Not `new_empty`, which keeps the class of a tensor: what a small message carries is a plain one.
        out = torch.empty((self.size * longest, *placed.shape[1:]), dtype=placed.dtype, device=placed.device)
        if out.numel():
            _all_gather(_bytes(out), _bytes(placed), group=group)
        if not even:
            out = torch.cat([part[:size] for part, size in zip(out.split(longest), sizes, strict=True)])
        return out.to(tensor.device)


def _has_backend(device: torch.device) -> bool:
    """Whether the default group takes tensors of this device, without a detour over the host."""
    backend = dist.get_backend_config()
    entries = dict(part.split(":", 1) for part in str(backend).split(",") if ":" in part)
    name = entries.get(device.type, "undefined")
    # gloo lists CUDA among its devices, but copies through the host and lacks some collectives there
    return name != "undefined" and (name != "gloo" or device.type == "cpu")


def _one_dim_at_least(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.ndim == 0:
        tensor = tensor[None]
    return _solid(tensor)


def _solid(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy of it whose memory holds its elements in order and as they read."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.contiguous().resolve_conj().resolve_neg()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat row of bytes: every backend knows how to move these."""
    # Not `view(-1)`: a single element may keep the stride of the row it was taken from, which no view of bytes has.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _all_say(header: bytes, headers: list[memoryview]) -> bool:
    length = len(header)
    for other in headers:  # noqa: SIM110  (a generator takes longer than the comparison of two)
        if other[:length] != header:
            return False
    return True


def _unpacking(
    tensors: list[torch.Tensor], lengths: list[list[int]], places: list[int]
) -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
    """Memory for the gathered tensors, and what fills it: to which address, from which, how many bytes.

    lengths: of the parts of all ranks. places: where the parts of each rank begin.
    """
    places = list(places)
    outs, moves = [], []
    for tensor, sizes in zip(tensors, lengths, strict=True):
        rest = tensor.shape[1:]
        out = torch.empty((sum(sizes), *rest), dtype=tensor.dtype)
        row = out.itemsize * rest.numel()
        address = out.data_ptr()
        for rank, length in enumerate(sizes):
            size = length * row
            moves.append((address, places[rank], size))
            places[rank] += size
            address += size
        outs.append(out)
    return outs, moves


def _differing(keys: list[tuple[str | int, ...]]) -> list[str]:
    """The keys of each rank, in words, around the first place where they differ."""
    place = next(place for place in itertools.count() if len({own[place : place + 1] for own in keys}) > 1)
    start, end = max(place - 1, 0), place + 3
    words = [["..."] * (start > 0) + [str(key) for key in own[start:end]] + ["..."] * (len(own) > end) for own in keys]
    return [", ".join(each) or "none" for each in words]


def _remedy(brought: list[tuple[list[tuple[str, list[int]]], int]]) -> str:
    """What would make the tensors of all ranks fit. brought: by rank, dtype and shape of each, and how many more."""

    def differ(seen: Callable[[str, list[int]], Any]) -> bool:
        return len({str([seen(*tensor) for tensor in tensors]) for tensors, _ in brought}) > 1

    if len({len(tensors) + more for tensors, more in brought}) > 1:
        return "Pass the same tensors, nested in the same way, on every rank"
    if differ(lambda dtype, shape: dtype):
        return "Convert them to one dtype with `tensor.to(dtype)`"
    if differ(lambda dtype, shape: len(shape)):
        return "Give them the same number of dimensions"
    return "Pad them with `pad_across_processes`"
