"""Batches that get to a device behind the compute, where the device that is not here is played by the CPU."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate.comm.tree import leaves
from accelerate.data_loader import prepare_data_loader
from accelerate.devices import CPU
from accelerate.devices.feed import Feeder, OverlappedTransfer
from accelerate.devices.transfer import Transfer
from accelerate.torch_internals.data_loader import pin_memory
from tests.unit.devices.lanes import FakeWay

LARGE = 50_000  # elements: some parts of a buffer, and more than is sent off at once


@pytest.fixture
def way() -> FakeWay:
    return FakeWay()


@pytest.fixture(params=["by threads", "by the loop"])
def feeder(way: FakeWay, request: pytest.FixtureRequest) -> Iterator[Feeder]:
    feeder = Feeder(way)
    feeder.stager._size = 10_000
    if request.param == "by threads":
        feeder.buffers.size = 0
    yield feeder
    feeder.stager.close()


@pytest.fixture
def fed(feeder: Feeder, monkeypatch: pytest.MonkeyPatch) -> Feeder:
    """Prepared loaders take this way to the CPU."""

    def transfer(self: CPU, device: torch.device, non_blocking: bool) -> Transfer:
        return OverlappedTransfer(feeder, non_blocking)

    monkeypatch.setattr(CPU, "transfer", transfer)
    return feeder


def prepared(loader: DataLoader[Any], **arguments: Any) -> Any:
    return prepare_data_loader(loader, torch.device("cpu"), put_on_device=True, **arguments)


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str


class Boxed:
    """Something that has a way of its own to a device, and to pinned memory."""

    def __init__(self, x: torch.Tensor, pinned: bool = False) -> None:
        self.x, self.pinned = x, pinned

    def to(self, device: Any) -> Boxed:
        return Boxed(self.x.clone(), self.pinned)

    def pin_memory(self) -> Boxed:
        return Boxed(self.x, True)


def large(number: int) -> torch.Tensor:
    return torch.arange(LARGE, dtype=torch.float32) + number


def of_all_kinds(number: int) -> Any:
    x = large(number)
    picture = x[:48_000].view(4, 3, 40, 100)
    return {
        "plain": x,
        "strides": [picture.to(memory_format=torch.channels_last), x.view(200, 250).t()],
        "gaps": (x.view(200, 250)[:, ::3], x.view(200, 250)[:, 3:], x[:1].expand(300), x[5:6].view(1, 1)),
        "dtypes": Pair(
            x.to(torch.bfloat16), {"bool": x[:333] > 3, "nothing": torch.empty(0, 3), "complex": x[:9] * 1j}
        ),
        "record": Record(torch.tensor(number), "name"),
        "rest": [None, "text", 3, torch.float32],
    }


def many_small(number: int) -> Any:
    return {str(i): torch.full((i % 7 + 1, 3), number * 1000 + i, dtype=torch.int32) for i in range(500)}


def many_alike(number: int) -> Any:
    return [torch.full((3, 5), float(number * 1000 + i)) for i in range(500)]


def many_of_many_kinds(number: int) -> Any:
    """Some travel together, some alone, and they are mixed."""
    x = torch.arange(60.0).view(3, 20) + number
    dtypes = [torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.complex64]
    rows = [(x[:, i % 7] if i % 5 == 4 else x[i % 3]).to(dtypes[i % 4]) for i in range(200)]
    rest = {"odd": x.to(torch.float64), "nothing": torch.empty(0, 3), "large": large(number), "complex": x * 1j}
    return {"rows": rows, "rest": rest, "text": "text", "turned": [x.t() + i for i in range(20)]}


def boxed(number: int) -> Any:
    return {"box": Boxed(large(number)), "y": large(number)}


def tiny(number: int) -> Any:
    return torch.full((4,), float(number)), torch.tensor([number])


def tiny_of_all_kinds(number: int) -> Any:
    x = torch.full((2, 3), number * (1 + 1j))
    sparse = torch.full((2, 3), float(number)).to_sparse()
    return {"conjugated": x.conj(), "negated": x.conj().imag, "rows": [x.real.t(), (x.imag[:, ::2],)], "sparse": sparse}


def with_graph(number: int) -> Any:
    return [large(number).requires_grad_()]


KINDS = [of_all_kinds, many_small, many_alike, many_of_many_kinds, boxed, tiny, tiny_of_all_kinds, with_graph]


class Made(Dataset[Any]):
    """Batches made of their numbers, here and in this thread alone."""

    def __init__(self, make: Any, count: int = 6) -> None:
        self.make, self.count = make, count
        self.threads: set[Any] = set()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread())
        return self.make(index)


def values(batch: Any) -> list[Any]:
    if isinstance(batch, dict) and "box" in batch:
        return [batch["box"].x, batch["y"]]
    return leaves(batch)


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(values(found), values(expected), strict=True):
        assert one.layout is other.layout
        if one.is_sparse:
            one, other = one.to_dense(), other.to_dense()
        assert torch.equal(one, other) and one.dtype == other.dtype
        assert one.data_ptr() != other.data_ptr() or not one.numel()
    if isinstance(expected, dict):
        assert list(found) == list(expected)


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("make", KINDS)
def test_every_kind_of_batch_arrives_as_it_was(make: Any, dispatch: bool, fed: Feeder) -> None:
    data = Made(make)
    loader = prepared(DataLoader(data, batch_size=None), dispatch_batches=dispatch)
    for _ in range(2):  # the buffers are used again
        found = list(loader)  # kept: none is overwritten by a later one
        assert len(found) == 6
        for number, batch in enumerate(found):
            assert_same(batch, make(number))
    assert data.threads == {threading.main_thread()}


def test_strides_types_and_what_is_no_tensor_are_kept(feeder: Feeder) -> None:
    transfer = OverlappedTransfer(feeder, False)
    batch = of_all_kinds(3)
    found = transfer.finish(transfer.start(batch))
    expected = [torch.empty_like(tensor).stride() for tensor in leaves(batch)]
    assert [tensor.stride() for tensor in leaves(found)] == expected
    assert type(found["dtypes"]) is Pair and type(found["record"]) is Record
    assert found["rest"] == batch["rest"] and found["record"].name == "name"
    # None is a part of another one.
    assert len({tensor.untyped_storage().data_ptr() for tensor in leaves(found) if tensor.numel()}) == 11


def test_memory_for_buffers_does_not_grow_with_the_batches(way: FakeWay, feeder: Feeder) -> None:
    transfer = OverlappedTransfer(feeder, False)
    for number in range(20):
        assert_same(transfer.finish(transfer.start(large(number))), large(number))
    assert len(way.buffers) <= 8


def test_a_small_batch_wakes_no_thread(way: FakeWay, fed: Feeder) -> None:
    """The loop itself copies it, in less time than a thread takes to wake up."""
    by_loop = fed.buffers.size > 0

    def medium(number: int) -> Any:
        return {"x": large(number), "y": torch.tensor([number]), "z": large(number)[: LARGE // 2]}

    loader = prepared(DataLoader(Made(medium, count=20), batch_size=None))
    for number, batch in enumerate(loader):
        assert_same(batch, medium(number))
    assert bool(fed.stager._threads) is not by_loop and bool(way.entered) is not by_loop
    assert (way.senders == {str(threading.get_ident())}) is by_loop
    assert len(way.buffers) <= 8


def test_a_batch_that_is_larger_than_a_buffer_of_the_loop_is_left_to_the_threads(way: FakeWay) -> None:
    feeder = Feeder(way)
    transfer = OverlappedTransfer(feeder, False)
    most = torch.arange(1 << 18, dtype=torch.float32)
    assert_same(transfer.finish(transfer.start([most])), [most])
    assert not feeder.stager._threads
    more = [most, torch.zeros(1)]
    assert_same(transfer.finish(transfer.start(more)), more)
    assert feeder.stager._threads
    feeder.stager.close()


def test_small_tensors_travel_together(way: FakeWay, feeder: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = way.send

    def noted(outs: list[torch.Tensor], *rest: Any) -> None:
        sent.append(sum(out.nbytes for out in outs))
        send(outs, *rest)

    monkeypatch.setattr(way, "send", noted)
    transfer = OverlappedTransfer(feeder, False)
    assert_same(transfer.finish(transfer.start(many_small(1))), many_small(1))
    assert sent == [sum(tensor.nbytes for tensor in many_small(1).values())]  # three times a buffer of 10 kB
    more = [tensor for number in range(2) for tensor in many_small(number).values()]
    sent.clear()
    assert_same(transfer.finish(transfer.start(more)), more)
    assert sum(sent) == sum(tensor.nbytes for tensor in more)
    assert len(sent) == (1 if feeder.buffers.size else 2)  # of at most four buffers each


class Reusing(Dataset[Any]):
    """One memory for all batches, as of readers that fill what they were given."""

    def __init__(self) -> None:
        self.memory = torch.zeros(LARGE)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.memory.fill_(index)


def test_a_dataset_may_fill_the_same_memory_again(fed: Feeder) -> None:
    found = list(prepared(DataLoader(Reusing(), batch_size=None)))
    assert [(batch.min().item(), batch.max().item()) for batch in found] == [(float(i), float(i)) for i in range(8)]


def test_a_loop_may_break_off_at_any_time(fed: Feeder) -> None:
    loader = prepared(DataLoader(Made(large), batch_size=None))
    for stop in range(6):
        for number, batch in enumerate(loader):
            assert torch.equal(batch, large(number))
            if number == stop:
                break
    assert len(list(loader)) == 6


class ReusingMany(Reusing):
    """The same, in many tensors."""

    def __init__(self) -> None:
        self.memory = torch.zeros(100, 20)

    def __getitem__(self, index: int) -> Any:
        return self.memory.fill_(index).unbind()


def test_small_tensors_are_of_their_own_though_they_travel_together(fed: Feeder) -> None:
    for number, batch in enumerate(prepared(DataLoader(ReusingMany(), batch_size=None))):
        assert len(batch) == 100 and all((tensor == number).all() for tensor in batch)
        assert len({tensor.untyped_storage().data_ptr() for tensor in batch}) == 100
        version = batch[1]._version
        batch[0].zero_()  # autograd takes none of the others for changed
        assert batch[1]._version == version


class Stream(IterableDataset[Any]):
    def __init__(self, sizes: list[int], way: FakeWay) -> None:
        self.sizes, self.way = sizes, way

    def __iter__(self) -> Iterator[Any]:
        for size in self.sizes:
            yield torch.full((size,), float(size))


def test_the_memory_of_a_dispatched_batch_is_taken_before_the_step_it_is_copied_beside(
    way: FakeWay, fed: Feeder
) -> None:
    sizes = [LARGE] * 4 + [LARGE // 2] * 2
    loader = prepared(DataLoader(Stream(sizes, way), batch_size=None), dispatch_batches=True)
    kept = []
    for batch in loader:
        kept.append(batch)
        way.work += 1  # the step
    assert [(len(batch), batch.unique().tolist()) for batch in kept] == [(size, [size]) for size in sizes]
    # The copy of a batch waits for what was submitted before the step of the one before, but where that had another
    # size, whose memory is of no use.
    assert way.followed == [0, 0, 1, 2, 4, 4]


def test_what_is_pinned_is_copied_from_where_it_is(
    way: FakeWay, feeder: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []

    def is_pinned(tensor: torch.Tensor) -> bool:
        asked.append(tensor)
        return True

    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    transfer = OverlappedTransfer(feeder, False)
    for number in range(4):
        assert_same(transfer.finish(transfer.start([large(number)])), [large(number)])
        transfer.wait()
    assert way.buffers == [] and len(way.followed) == 4
    assert len(asked) == 1  # of the first batch: it is a question to the driver


def test_pinned_things_with_a_way_of_their_own_go_it_ahead(
    way: FakeWay, feeder: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    transfer = OverlappedTransfer(feeder, False)
    assert_same(transfer.finish(transfer.start(boxed(1))), boxed(1))
    assert len(way.followed) == 1


@pytest.mark.parametrize("make", [large, boxed])
def test_a_loader_that_pins_leaves_it_to_the_buffers(make: Any, fed: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    """But what cannot go through them is pinned as torch does it."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # which torch 2.6 asks
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *device: self)
    pinned: list[Any] = []

    def noted(batch: Any) -> Any:
        pinned.append(batch)
        return pin_memory(batch)

    monkeypatch.setattr("accelerate.devices.feed.pin_memory", noted)
    loader = prepared(DataLoader(Made(make), batch_size=None, pin_memory=True))
    for number, batch in enumerate(loader):
        assert_same(batch, make(number))
        if make is boxed:
            assert batch["box"].pinned
    assert loader.pin_memory is True
    assert len(pinned) == (6 if make is boxed else 0)


def test_batches_arrive_where_there_is_no_memory_for_buffers(
    way: FakeWay, fed: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(way, "buffer", refuse)
    found = list(prepared(DataLoader(Made(large), batch_size=None)))
    assert all(torch.equal(batch, large(number)) for number, batch in enumerate(found))


@pytest.mark.parametrize("make", [large, many_small])
def test_in_inference_mode(make: Any, fed: Feeder) -> None:
    loader = prepared(DataLoader(Made(make), batch_size=None))
    for inference in (True, False):  # the buffers of the one are filled in the other
        with torch.inference_mode(inference):
            for number, batch in enumerate(loader):
                assert_same(batch, make(number))


def test_a_first_batch_without_tensors_does_not_confuse_the_next(feeder: Feeder) -> None:
    transfer = OverlappedTransfer(feeder, False)
    words = transfer.start(["a", "b"])
    assert transfer.finish(words) == ["a", "b"]
    assert_same(transfer.finish(transfer.start([large(0)])), [large(0)])


@pytest.mark.parametrize(
    ("pinned", "asked_for", "waits_no_longer_than_the_source"),
    [([False], False, True), ([True, False], False, False), ([True, False], True, True)],
)
def test_copies_wait_for_no_more_than_they_must(
    pinned: list[bool],
    asked_for: bool,
    waits_no_longer_than_the_source: bool,
    feeder: Feeder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is pageable has been read when its copy returns."""
    answers = iter(pinned)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: next(answers))
    transfer = OverlappedTransfer(feeder, asked_for)
    transfer.finish(transfer.start([torch.zeros(2) for _ in pinned]))
    assert transfer.non_blocking is waits_no_longer_than_the_source
