"""Shuffling without a list of indices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    indexed,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.data_loader.indexed import Bijection, IndexedRandomSampler
from accelerate.utils import DataLoaderConfiguration

HUGE = 10**10


class Numbers(Dataset):  # type: ignore[type-arg]
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.length
        return index


def in_standard_deviations(counts: Any, expected: float, degrees: int) -> float:
    """How far a chi-square is from what it is on average."""
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 17, 1000, 4097])
def test_each_number_comes_once(length: int) -> None:
    orders = [Bijection(length, 5, epoch)(0, length).tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(length)) for order in orders)
    assert length < 7 or len({tuple(order) for order in orders}) == 4
    assert Bijection(length, 5, 0)(length // 2, length).tolist() == orders[0][length // 2 :]


def test_every_number_is_as_likely_everywhere() -> None:
    length, epochs = 61, 3000
    places, steps = np.zeros((length, length)), np.zeros(length)
    for epoch in range(epochs):
        order = Bijection(length, 1, epoch)(0, length)
        places[np.arange(length), order] += 1
        steps += np.bincount(np.diff(order) % length, minlength=length)
    assert abs(in_standard_deviations(places, epochs / length, (length - 1) ** 2)) < 4
    assert abs(in_standard_deviations(steps[1:], steps.sum() / (length - 1), length - 2)) < 4


def test_neighbors_have_nothing_to_do_with_each_other() -> None:
    length, bins = 1 << 18, 64
    order = Bijection(length, 1, 0)(0, length)
    for distance in (1, 2, 32, 512):
        pairs = np.histogram2d(order[distance:], order[:-distance], bins=bins)[0]
        assert abs(in_standard_deviations(pairs, (length - distance) / bins**2, (bins - 1) ** 2)) < 4
    table = np.histogram2d(np.arange(length), order, bins=bins)[0]
    assert abs(in_standard_deviations(table, length / bins**2, (bins - 1) ** 2)) < 4


def loader_of(length: int, **settings: Any) -> Any:
    plain: Any = DataLoader(Numbers(length), batch_size=settings.pop("batch_size", 4), shuffle=True)
    return prepare_data_loader(plain, shuffle="indexed", data_seed=3, **settings)


def test_all_processes_have_one_order() -> None:
    alone = [batch.tolist() for batch in loader_of(96)]
    assert sorted(itertools.chain(*alone)) == list(range(96))
    for processes in (2, 3):
        loaders = [loader_of(96, num_processes=processes, process_index=index) for index in range(processes)]
        assert [batch.tolist() for step in zip(*loaders, strict=True) for batch in step] == alone
    split = [loader_of(96, num_processes=2, process_index=index, split_batches=True) for index in range(2)]
    assert [torch.cat(step).tolist() for step in zip(*split, strict=True)] == alone


def test_epochs() -> None:
    loader = loader_of(50)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first != second and sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == first
    loader.set_epoch(1)
    assert [batch.tolist() for batch in skip_first_batches(loader, 5)] == second[5:]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many indices were computed."""
    count = [0]
    original = Bijection.__call__

    def counted(self: Bijection, start: int, stop: int) -> Any:
        count[0] += stop - start
        return original(self, start, stop)

    monkeypatch.setattr(indexed.Bijection, "__call__", counted)
    return count


@pytest.mark.parametrize("settings", [{}, {"num_processes": 2, "process_index": 1}, {"dispatch_batches": True}])
def test_billions_of_samples(computed: list[int], settings: dict[str, Any]) -> None:
    loader = loader_of(HUGE, batch_size=32, put_on_device=True, device=torch.device("cpu"), **settings)
    order = Bijection(HUGE, 3, 0, 0)
    mine = 32 if "num_processes" in settings else 0
    assert next(iter(loader)).tolist() == order(mine, mine + 32).tolist()
    loader.set_epoch(0)
    steps = 10**8
    place = steps * 32 * settings.get("num_processes", 1) + mine
    assert next(iter(skip_first_batches(loader, steps))).tolist() == order(place, place + 32).tolist()
    assert computed[0] < 20_000


@pytest.mark.parametrize("settings", [{}, {"dispatch_batches": True}])
def test_resuming_among_billions(computed: list[int], settings: dict[str, Any], tmp_path: Any) -> None:
    config = DataLoaderConfiguration(shuffle="indexed", data_seed=3, exact_resume=True, **settings)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader: Any = accelerator.prepare(DataLoader(Numbers(HUGE), batch_size=8, shuffle=True))
    rest = iter(accelerator.skip_first_batches(loader, 10**8))
    for _ in range(3):
        next(rest)
    accelerator.save_state(tmp_path / "x")
    following = next(rest).tolist()
    rest.close()
    accelerator.load_state(tmp_path / "x")
    assert next(iter(loader)).tolist() == following
    assert computed[0] < 20_000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_jump_comes_to_where_a_walk_does(drop_last: bool, even: bool, split: bool) -> None:
    sampler: Any = IndexedRandomSampler(range(45), data_seed=1)
    order = list(sampler.order())
    for count, index in itertools.product(range(8), range(3)):
        results = []
        for source in (sampler, order):
            sampler.set_epoch(0)
            shard = BatchSamplerShard(BatchSampler(source, 6, drop_last), 3, index, split, even)
            rest = SkipBatchSampler(shard, count)
            batches = list(rest)
            counts = [rest.counts(number) for number in (*range(len(batches)), -1)] if batches else []
            results.append((batches, counts, rest.missed_steps, rest.uneven, len(rest)))
        assert results[0] == results[1], (count, index)


def test_more_samples_than_there_are_and_some_twice() -> None:
    sampler = IndexedRandomSampler(range(10), num_samples=25, data_seed=1)
    indices = list(sampler)
    assert sorted(indices[:10]) == sorted(indices[10:20]) == list(range(10)) and len(set(indices[20:])) == 5
    assert indices[:10] != indices[10:20]
    sampler.set_epoch(0)
    assert list(sampler.after(7)) == indices[7:] and sampler.epoch == 1
    replaced: Any = DataLoader(Numbers(9), sampler=RandomSampler(range(9), replacement=True))
    prepared = prepare_data_loader(replaced, shuffle="indexed")
    assert type(prepared.batch_sampler.sampler) is SeedableRandomSampler


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="shuffle is 'index': choose None or 'indexed'"):
        DataLoaderConfiguration(shuffle="index")
