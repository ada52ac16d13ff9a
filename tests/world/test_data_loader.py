"""Prepared loaders on several processes: who gets which samples, in which order."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from accelerate.utils import set_seed, synchronize_rng_states
from tests.harness import run_world


class Numbers(Dataset):
    def __init__(self, n: int = 24) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index)


class Stream(IterableDataset):
    def __init__(self, n: int = 24) -> None:
        self.n = n
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


class GeneratorSampler(Sampler):
    """A sampler of one's own, with a generator under the usual name."""

    def __init__(self, n: int, seed: int) -> None:
        self.n = n
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


class GeneratorBatches(BatchSampler):
    """A batch sampler that shuffles by itself."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.batch_size, self.drop_last = n, 2, False
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.n // 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(self.n, generator=self.generator).view(-1, 2).tolist())


class GlobalSampler(GeneratorSampler):
    """One that draws from torch's global generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n).tolist())


def own(loader: Any) -> list[int]:
    return [value for batch in loader for value in batch.reshape(-1).tolist()]


def everyone(accelerator: Accelerator, values: Any) -> list[Any]:
    return accelerator._communicator.gather_objects(values)


def every_order_is_shared() -> None:
    """Ranks are seeded differently on purpose, and still see every sample exactly once per epoch."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    torch.manual_seed(100 + rank)
    data = Numbers()
    cases: dict[str, tuple[DataLoader, dict[str, Any]]] = {
        "shuffle": (DataLoader(data, 2, shuffle=True), {}),
        "shuffle, split": (DataLoader(data, 12, shuffle=True), {"split_batches": True}),
        "seedable": (DataLoader(data, 2, shuffle=True), {"use_seedable_sampler": True}),
        "own generator": (DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(rank)), {}),
        "subset": (DataLoader(data, 2, sampler=SubsetRandomSampler(range(24))), {}),
        "weighted": (DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * 24, 24, replacement=False)), {}),
        "own sampler": (DataLoader(data, 2, sampler=GeneratorSampler(24, rank)), {}),
        "own batch sampler": (DataLoader(data, batch_sampler=GeneratorBatches(24, rank)), {}),
        "no batches": (DataLoader(data, batch_size=None, sampler=RandomSampler(data)), {}),
        "batches as indices": (
            DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 2, False)),
            {},
        ),
        "global": (DataLoader(data, 2, sampler=GlobalSampler(24)), {"rng_types": ["torch"]}),
        "iterable": (DataLoader(Stream(), 2), {}),
        "workers": (DataLoader(data, 2, shuffle=True, num_workers=1), {}),
    }
    for name, (plain, options) in cases.items():
        loader = prepare_data_loader(plain, **{"rng_types": ["generator"], **options})
        assert type(loader) is DataLoaderShard
        orders = []
        for _ in range(2):
            parts = everyone(accelerator, own(loader))
            assert sorted(value for part in parts for value in part) == list(range(24)), (name, parts)
            orders.append(parts)
        assert orders[0] != orders[1], name
        # broken off at once, by all: the next epoch is another one, and still shared
        for _ in loader:
            break
        parts = everyone(accelerator, own(loader))
        assert sorted(value for part in parts for value in part) == list(range(24)), name
        assert parts not in orders, name


def seeds_decide_the_order() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42)
    accelerator = Accelerator(dataloader_config=config)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(Numbers(8), 2, shuffle=True))
    for epoch in range(3):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(42 + epoch)).view(-1, 2)
        expected = order[accelerator.process_index :: accelerator.num_processes]
        assert own(loader) == expected.reshape(-1).tolist()
    loader.set_epoch(0)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(42)).view(-1, 2)
    assert own(loader)[:2] == order[accelerator.process_index].tolist()


def random_states_follow_rank_0() -> None:
    accelerator = Accelerator()
    set_seed(5, device_specific=True)
    values = everyone(accelerator, torch.rand(1).item())
    assert len(set(values)) == accelerator.num_processes
    synchronize_rng_states(["torch"])
    assert len(set(everyone(accelerator, torch.rand(1).item()))) == 1
    generator = torch.Generator().manual_seed(accelerator.process_index)
    synchronize_rng_states(["generator"], generator)
    assert len(set(everyone(accelerator, torch.rand(1, generator=generator).item()))) == 1
    synchronize_rng_states(["generator"])  # where there is none, there is nothing to do
    set_seed(5)
    assert len(set(everyone(accelerator, torch.rand(1).item()))) == 1
    with pytest.raises(ValueError, match="nonsense"):
        synchronize_rng_states(["nonsense"])


def distributed_samplers() -> None:
    accelerator = Accelerator()
    processes, rank = accelerator.num_processes, accelerator.process_index
    data = Numbers(17)

    def sampler(replicas: int) -> Any:
        return DistributedSampler(data, replicas, rank % replicas, shuffle=True, seed=3)

    for plain in (
        DataLoader(data, 4, sampler=sampler(processes)),
        DataLoader(data, batch_sampler=BatchSampler(sampler(processes), 4, False)),
        DataLoader(data, batch_size=None, sampler=sampler(processes)),
        DataLoader(data, batch_size=None, sampler=BatchSampler(sampler(processes), 4, False)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = accelerator.prepare(plain)
        assert [str(warning.message)[:37] for warning in caught] == ["This loader's DistributedSampler alre"]
        orders = []
        for epoch in range(2):
            expected = sampler(processes)
            expected.set_epoch(epoch)
            assert own(loader) == list(expected)
            orders.append(own_epoch := list(expected))
            assert len(own_epoch) == -(-17 // processes)
        assert orders[0] != orders[1], "set_epoch reaches the sampler"
        assert loader.total_dataset_length == 17
        rest = accelerator.skip_first_batches(loader, 1)
        assert len(rest) == len(loader) - 1 == len(list(rest))

    # one for another number of processes says nothing about this world
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = accelerator.prepare(DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0, shuffle=False)))
    parts = everyone(accelerator, own(loader))
    assert parts[0][:4] == [0, 1, 2, 3] and parts[1][:4] == [4, 5, 6, 7]
    assert {value for part in parts for value in part} == set(range(17))


def which_kind_of_loader() -> None:
    accelerator = Accelerator()
    assert type(accelerator.prepare(DataLoader(Stream(), 2))) is DataLoaderDispatcher
    assert type(accelerator.prepare(DataLoader(Numbers(), 2))) is DataLoaderShard
    assert type(accelerator.prepare_data_loader(DataLoader(Stream(), 2), device_placement=False)) is DataLoaderShard
    with pytest.warns(UserWarning, match="prepared before"):
        loader = accelerator.prepare(accelerator.prepare(DataLoader(Numbers(), 2)))
    assert sum(len(part) for part in everyone(accelerator, own(loader))) == 24


def stateful_on_several_ranks(dispatch: bool, workers: int) -> None:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=1, dispatch_batches=dispatch
    )
    accelerator = Accelerator(dataloader_config=config)

    def fresh() -> Any:
        return accelerator.prepare(DataLoader(Numbers(21), 2, shuffle=True, num_workers=workers))

    loader = fresh()
    batches, states = [], []
    for batch in loader:
        batches.append(accelerator.gather_for_metrics(batch).tolist())
        states.append(copy.deepcopy(loader.state_dict()))
    assert sorted(value for batch in batches for value in batch) == list(range(21))
    for number in range(len(batches) - 1):
        resumed = fresh()
        resumed.load_state_dict(states[number])
        rest = [accelerator.gather_for_metrics(batch).tolist() for batch in resumed]
        assert rest == batches[number + 1 :], number


def lengths_without_even_batches() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    for n in range(1, 14):
        loader = accelerator.prepare(DataLoader(Numbers(n), 2))
        ends = [(loader.end_of_dataloader, loader.ends_everywhere) for _ in loader]
        counts = everyone(accelerator, len(ends))
        assert len(ends) == len(loader)
        if ends:
            assert ends[-1] == (True, len(ends) == max(counts))
        parts = everyone(accelerator, own(loader))
        assert sorted(value for part in parts for value in part) == list(range(n))


def training_does_not_hang_at_uneven_ends() -> None:
    for n, options, plain in (
        (5, {}, {"batch_size": None}),  # 3 and 2 samples, without batches
        (1, {}, {"batch_size": None}),
        (1, {"split_batches": True}, {"batch_size": 4}),  # nothing at all for the second process
        (9, {"split_batches": True}, {"batch_size": 4}),
    ):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False, **options))
        model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(Numbers(n), **plain))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
        for skip in (0, 1, 2, 9):
            for batch in accelerator.skip_first_batches(loader, skip) if skip else loader:
                accelerator.backward(model(batch.float().reshape(-1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
            weights = everyone(accelerator, model.module.weight.item())
            assert len(set(weights)) == 1, (n, options, skip)
        accelerator.free_memory()


def test_two_processes() -> None:
    for function in (
        every_order_is_shared,
        seeds_decide_the_order,
        random_states_follow_rank_0,
        distributed_samplers,
        which_kind_of_loader,
        lengths_without_even_batches,
        training_does_not_hang_at_uneven_ends,
    ):
        run_world(function, 2, timeout=30)


def test_three_processes() -> None:
    for function in (every_order_is_shared, distributed_samplers, lengths_without_even_batches):
        run_world(function, 3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatch", [False, True])
def test_stateful_loaders(dispatch: bool, workers: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    run_world(stateful_on_several_ranks, 2, dispatch, workers)
