"""The prepared loader in one process."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler, prepare_data_loader, skip_first_batches
from accelerate.state import GradientState

CPU = torch.device("cpu")


class Numbers(Dataset):
    def __init__(self, n: int = 10) -> None:
        self.n = n
        self.fetched: list[Any] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor(index)


def prepared(loader: DataLoader, **options: Any) -> Any:
    return prepare_data_loader(loader, CPU, put_on_device=True, **options)


def values(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


# --- batches and devices


class Pair(NamedTuple):
    x: torch.Tensor
    text: str


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    text: str


class Movable:
    def __init__(self) -> None:
        self.device = "cpu"

    def to(self, device: Any) -> Movable:
        moved = Movable()
        moved.device = str(device)
        return moved


META = torch.device("meta")  # a device that every machine has


@pytest.mark.parametrize("non_blocking", [False, True])
def test_every_kind_of_batch_is_moved(non_blocking: bool) -> None:
    x = torch.ones(2)
    kinds: Any = [
        x,
        {"x": x, "text": "a", "deep": [{"y": x}]},
        (x, "a"),
        [x, 3, None],
        Pair(x, "a"),
        Record(x, "a"),
        Movable(),
        "only text",
        ["a", "b"],
    ]
    plain: Any = DataLoader(kinds, batch_size=None, collate_fn=lambda item: item)
    loader = prepare_data_loader(plain, META, put_on_device=True, non_blocking=non_blocking)
    got = list(loader)
    assert [type(batch) for batch in got] == [type(batch) for batch in kinds]
    assert got[0].device == META
    assert got[1]["x"].device == got[1]["deep"][0]["y"].device == META and got[1]["text"] == "a"
    assert got[2][0].device == got[3][0].device == META and got[3][1:] == [3, None]
    assert got[4].x.device == got[5].x.device == META and got[4].text == got[5].text == "a"
    assert got[6].device == "meta" and got[7:] == ["only text", ["a", "b"]]
    kept = list(prepare_data_loader(plain, META, put_on_device=False))
    assert kept[0].device == kept[1]["x"].device == CPU and kept[6].device == "cpu"


# --- one batch of look-ahead


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9, 10])
def test_the_last_batch_is_known_while_it_is_processed(n: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(n), batch_size=2))
    state = accelerator.gradient_state
    seen = []
    for batch in loader:
        assert state.in_dataloader and state.active_dataloader is loader
        seen.append((len(batch), loader.end_of_dataloader, state.end_of_dataloader, state.remainder))
    steps = -(-n // 2)
    assert len(seen) == len(loader) == steps
    assert [s[1] for s in seen] == [s[2] for s in seen] == [False] * (steps - 1) + [True] * (steps > 0)
    assert {s[3] for s in seen} <= {n % 2}
    assert not state.in_dataloader and state.active_dataloader is None and not state.end_of_dataloader


def test_only_one_batch_ahead_is_read() -> None:
    dataset = Numbers(10)
    for step, _ in enumerate(prepared(DataLoader(dataset, batch_size=2))):
        assert len(dataset.fetched) == min(2 * (step + 2), 10)


def test_break_and_exceptions_leave_nothing_behind() -> None:
    state = GradientState()
    loader = prepared(DataLoader(Numbers(), batch_size=2))
    for _ in loader:
        break
    assert not state.in_dataloader and loader.iteration == 1
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    assert not state.in_dataloader and loader.iteration == 2
    assert values(loader) == values(DataLoader(Numbers(), batch_size=2))


def test_two_loaders_inside_each_other() -> None:
    state = GradientState()
    outer, inner = (prepared(DataLoader(Numbers(n), batch_size=2)) for n in (4, 6))
    trace = []
    for _ in outer:
        for _ in inner:
            trace.append((state.active_dataloader is inner, state.end_of_dataloader))
        trace.append((state.active_dataloader is outer, state.end_of_dataloader))
    inner_loop = [(True, False), (True, False), (True, True)]
    assert trace == [*inner_loop, (True, False), *inner_loop, (True, True)]


def test_break_in_the_last_batch_of_an_inner_loader_is_not_the_end_of_the_outer_one() -> None:
    state = GradientState()
    outer, inner = (prepared(DataLoader(Numbers(n), batch_size=2)) for n in (6, 2))
    ends = []
    for _ in outer:
        for _ in inner:
            assert state.end_of_dataloader
            break
        ends.append(state.end_of_dataloader)
    assert ends == [False, False, True]


def test_the_same_loader_inside_itself() -> None:
    loader = prepared(DataLoader(Numbers(6), batch_size=2))
    pairs, ends = [], []
    for first in loader:
        ends.append(loader.end_of_dataloader)
        for second in loader:
            pairs.append((first.tolist(), second.tolist()))
    whole = [[0, 1], [2, 3], [4, 5]]
    assert pairs == [(first, second) for first in whole for second in whole]
    assert ends == [False, False, True]


def test_two_iterators_in_lockstep() -> None:
    loader = prepared(DataLoader(Numbers(6), batch_size=2))
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [(v, v) for v in values(loader)]


class Stops(Numbers):
    def __getitem__(self, index: Any) -> torch.Tensor:
        if index == 5:
            raise StopIteration
        return super().__getitem__(index)


class Breaks(Numbers):
    def __getitem__(self, index: Any) -> torch.Tensor:
        if index == 5:
            raise OSError("disk gone")
        return super().__getitem__(index)


def test_errors_of_the_dataset() -> None:
    # as in plain torch: StopIteration ends the loop, anything else is raised
    assert values(prepared(DataLoader(Stops(), batch_size=2))) == values(DataLoader(Stops(), batch_size=2))
    loader = prepared(DataLoader(Breaks(), batch_size=2))
    with pytest.raises(OSError, match="disk gone"):
        list(loader)
    assert not GradientState().in_dataloader


# --- what the loader was made with


def seed_worker(worker: int) -> None:
    torch.manual_seed(worker)


def test_arguments_are_kept() -> None:
    generator = torch.Generator()
    plain = DataLoader(
        Numbers(),
        batch_size=2,
        num_workers=2,
        pin_memory=True,
        timeout=30,
        worker_init_fn=seed_worker,
        multiprocessing_context="spawn",
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
        in_order=False,
    )
    for processes in (1, 2):
        loader = prepared(plain, num_processes=processes, process_index=0)
        names = "num_workers pin_memory timeout worker_init_fn generator prefetch_factor persistent_workers in_order"
        for name in names.split():
            assert getattr(loader, name) == getattr(plain, name), name
        assert loader.multiprocessing_context.get_start_method() == "spawn"
        assert loader.collate_fn is plain.collate_fn and loader.dataset is plain.dataset
        assert isinstance(loader, DataLoader) and isinstance(loader, DataLoaderShard)
        skipped = Accelerator(cpu=True).skip_first_batches(loader, 1)
        for name in names.split():
            assert getattr(skipped, name) == getattr(plain, name), name


def test_no_warning_for_arguments_nobody_gave() -> None:
    prepared(DataLoader(Numbers()))  # warnings are errors here


class Readers(Numbers):
    """Each sample is the number of the process that reads it."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(os.getpid())


def test_persistent_workers_live_through_epochs() -> None:
    loader = prepared(DataLoader(Readers(6), batch_size=6, num_workers=1, persistent_workers=True))
    first = values(loader)
    assert first != [[os.getpid()] * 6]
    assert values(loader) == first
    for _ in loader:
        break
    assert values(loader) == first
    twin = copy.copy(loader)
    assert values(twin) != first == values(loader)
    del loader, twin  # ends the workers


def test_pickle_and_deepcopy() -> None:
    loaders: list[Any] = [
        prepared(DataLoader(Numbers(5), batch_size=2)),
        prepared(DataLoader(Numbers(5), batch_size=2), num_processes=2, process_index=1),
        Accelerator(cpu=True).prepare(DataLoader(Numbers(5), batch_size=2)),
        prepared(DataLoader(Numbers(5), batch_size=2), dispatch_batches=True),
        skip_first_batches(prepared(DataLoader(Numbers(5), batch_size=2)), 1),
    ]
    for loader in loaders:
        whole = values(loader)
        for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
            assert type(twin) is type(loader) and isinstance(twin, DataLoader)
            assert twin.gradient_state.active_dataloader is None
            assert values(twin) == whole and len(twin) == len(loader)


def test_missing_attributes_are_named() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        prepared(DataLoader(Numbers())).nonsense  # noqa: B018


def test_prepared_twice_is_kept_with_one_warning() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=2))
    with pytest.warns(UserWarning, match="was prepared before") as caught:
        assert accelerator.prepare(loader) is loader
    assert len(caught) == 1 and accelerator._dataloaders == [loader]


# --- samplers


class Backwards(Sampler):
    epoch = -1

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(self.n)))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class OwnBatches:
    """A batch sampler that derives from nothing."""

    epoch = -1

    def __init__(self) -> None:
        self.batches = [[3], [1, 2, 7], [0, 9]]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return 3

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_own_samplers_and_batch_samplers_are_used_and_told_the_epoch() -> None:
    sampler = Backwards(10)
    for plain in (
        DataLoader(Numbers(), sampler=sampler, batch_size=3),
        DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, 3, False)),
        DataLoader(Numbers(), sampler=BatchSampler(sampler, 3, False), batch_size=None),
        DataLoader(Numbers(), sampler=sampler, batch_size=None),
    ):
        sampler.epoch = -1
        for processes in (1, 2):
            loader = prepared(plain, num_processes=processes, process_index=0)
            if processes == 1:
                assert values(loader) == values(plain)
            loader.set_epoch(5)
            assert sampler.epoch == 5 and loader.iteration == 5
            assert len(list(loader)) == len(loader)
            list(loader)
            assert sampler.epoch == 6
    batches = OwnBatches()
    plain = DataLoader(Numbers(), batch_sampler=batches)
    assert values(prepared(plain)) == values(plain) == batches.batches
    parts = [prepared(plain, num_processes=2, process_index=rank, even_batches=False) for rank in range(2)]
    assert [values(part) for part in parts] == [[[3], [0, 9]], [[1, 2, 7]]]
    parts[0].set_epoch(4)
    assert batches.epoch == 4


class CountingBatches(BatchSampler):
    """A batch sampler that shuffles by the epoch it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("processes", [1, 2])
def test_a_batch_sampler_in_the_place_of_a_sampler_is_told_the_epoch(processes: int) -> None:
    batches = CountingBatches(Backwards(10), 3, False)
    loader = prepared(DataLoader(Numbers(), sampler=batches, batch_size=None), num_processes=processes, process_index=0)
    loader.set_epoch(4)
    assert batches.epoch == 4
    list(loader), list(loader)
    assert batches.epoch == 5


def test_without_batches_indices_are_shared_out() -> None:
    plain = DataLoader(Numbers(5), batch_size=None)
    parts = [prepared(plain, num_processes=2, process_index=rank) for rank in range(2)]
    assert [values(part) for part in parts] == [[0, 2, 4], [1, 3, 0]]
    uneven = [prepared(plain, num_processes=2, process_index=rank, even_batches=False) for rank in range(2)]
    assert [values(part) for part in uneven] == [[0, 2, 4], [1, 3]]
    assert [part._shard.uneven for part in uneven] == [True, True]
    assert [part._shard.missed_steps for part in uneven] == [0, 1]
    assert [part.total_batch_size for part in uneven] == [2, 2]


def test_split_batches_wants_a_divisible_batch_size() -> None:
    with pytest.raises(ValueError, match="multiple of the 2 processes, but it is 3"):
        prepared(DataLoader(Numbers(), batch_size=3), num_processes=2, process_index=0, split_batches=True)


def test_what_clients_read() -> None:
    plain = DataLoader(Numbers(10), batch_size=2)
    loader = prepared(plain, num_processes=2, process_index=0)
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (4, 10, 3)
    assert loader.batch_sampler.num_processes == 2
    split = prepared(plain, num_processes=2, process_index=0, split_batches=True)
    assert (split.total_batch_size, len(split)) == (2, 5)
    counted = Numbers(10)
    counted.total_length = 1000  # type: ignore[attr-defined]  # of tokens, say
    dispatched = prepared(DataLoader(counted, batch_size=2), dispatch_batches=True)
    assert dispatched.total_dataset_length == 10
    loader.set_sampler(Backwards(10))
    assert isinstance(loader.get_sampler(), Backwards) and values(loader)[0] == [9, 8]
    with pytest.raises(ValueError, match="iterable dataset"):
        prepared(DataLoader(Endless()), dispatch_batches=False).set_sampler(None)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


# --- order


def test_shuffling_goes_on_after_a_break() -> None:
    for seedable in (False, True):
        torch.manual_seed(0)
        plain = DataLoader(Numbers(50), batch_size=50, shuffle=True)
        loader = prepared(plain, use_seedable_sampler=seedable, data_seed=1)
        orders = []
        for _ in range(4):
            for batch in loader:
                orders.append(tuple(batch.tolist()))
                break
        assert len(set(orders)) == 4
        assert isinstance(loader.get_sampler(), SeedableRandomSampler if seedable else RandomSampler)


def test_seedable_order_is_seed_plus_epoch() -> None:
    loader = prepared(DataLoader(Numbers(8), 8, shuffle=True), use_seedable_sampler=True, data_seed=10)
    expected = [torch.randperm(8, generator=torch.Generator().manual_seed(10 + epoch)).tolist() for epoch in range(3)]
    assert [values(loader)[0] for _ in range(3)] == expected
    loader.set_epoch(1)
    assert values(loader)[0] == expected[1] and values(loader)[0] == expected[2]


def test_seedable_keeps_the_number_of_samples() -> None:
    sampler = RandomSampler(Numbers(8), replacement=True, num_samples=20)
    loader = prepared(DataLoader(Numbers(8), 4, sampler=sampler), use_seedable_sampler=True, data_seed=10)
    assert len(loader) == 5 and sum(len(batch) for batch in loader) == 20


def test_one_process_reads_in_the_order_of_the_plain_loader() -> None:
    for dispatch in (False, True):
        plain = DataLoader(Numbers(20), 4, shuffle=True)
        torch.manual_seed(3)
        expected = [values(plain) for _ in range(2)]
        torch.manual_seed(3)
        loader = prepared(plain, dispatch_batches=dispatch)
        assert [values(loader) for _ in range(2)] == expected


def test_a_script_may_assign_another_device() -> None:
    loader: Any = DataLoaderShard(list(range(4)), device=torch.device("cpu"))
    assert next(iter(loader)).device.type == "cpu"
    loader.device = "meta"
    assert loader.device == "meta" and next(iter(loader)).device.type == "meta"
    loader.device = None
    assert next(iter(loader)).device.type == "cpu"
