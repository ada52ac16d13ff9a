"""What every communicator promises, run on each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate.comm import Communicator
from accelerate.comm.checked import Checked
from accelerate.comm.torch_dist import TorchDistributed
from tests.harness import run_world


def _gloo() -> TorchDistributed:
    dist.init_process_group("gloo")
    return TorchDistributed(torch.device("cpu"))


def _checked() -> Any:
    return Checked(_gloo())


def _checked_single() -> Any:
    return Checked(Communicator())


KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "single": (Communicator, 1),
    "checked single": (_checked_single, 1),
    "gloo, one process": (_gloo, 1),
    "gloo": (_gloo, 2),
    "checked": (_checked, 2),
}


def _place(communicator: Any) -> None:
    assert 0 <= communicator.rank < communicator.size
    communicator.barrier()


def _gather(communicator: Any) -> None:
    ranks = range(communicator.size)
    values, lengths = communicator.gather([torch.tensor([communicator.rank]), torch.ones(communicator.rank + 1, 2)])
    assert values.tolist() == list(ranks) and lengths.shape == (sum(rank + 1 for rank in ranks), 2)
    assert communicator.gather([]) == []


def _all_reduce(communicator: Any) -> None:
    size = communicator.size
    for op, expected in {"sum": sum(range(size)), "min": 0, "max": size - 1}.items():
        tensor = torch.tensor([communicator.rank])
        result = communicator.all_reduce(tensor, op)
        assert result is tensor and tensor.item() == expected


def _average(communicator: Any) -> None:
    size = communicator.size
    tensors = [torch.tensor([float(communicator.rank)]), torch.full((2, 2), 2.0 * communicator.rank)]
    communicator.average(tensors)
    assert tensors[0].tolist() == [(size - 1) / 2] and tensors[1].tolist() == [[size - 1.0] * 2] * 2


def _broadcast(communicator: Any) -> None:
    source = communicator.size - 1
    tensor = torch.arange(6).view(2, 3).t() + 10 * communicator.rank
    result = communicator.broadcast(tensor, source)
    assert result is tensor and torch.equal(tensor, torch.arange(6).view(2, 3).t() + 10 * source)


def _scatter(communicator: Any) -> None:
    parts = [torch.tensor([rank, 7]) for rank in range(communicator.size)] if communicator.rank == 0 else None
    out = torch.empty(2, dtype=torch.int64)
    communicator.scatter(out, parts)
    assert out.tolist() == [communicator.rank, 7]


def _objects(communicator: Any) -> None:
    assert communicator.gather_objects({"r": communicator.rank}) == [{"r": r} for r in range(communicator.size)]
    values = [communicator.rank, "x"]
    communicator.broadcast_objects(values, communicator.size - 1)
    assert values == [communicator.size - 1, "x"]
    communicator.verify("gather", {"a": torch.ones(communicator.rank, 2)})


PROMISES = [_place, _gather, _all_reduce, _average, _broadcast, _scatter, _objects]


def _keep(kind: str, promise: Callable[[Any], None]) -> None:
    make, processes = KINDS[kind]
    communicator = make()
    assert communicator.size == processes
    promise(communicator)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__.strip("_"))
@pytest.mark.parametrize("kind", KINDS)
def test_promise(kind: str, promise: Callable[[Any], None]) -> None:
    run_world(_keep, KINDS[kind][1], kind, promise)
