"""Continuing in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from accelerate import Accelerator
from accelerate.data_loader import SkipDataLoader, prepare_data_loader, skip_first_batches


class Numbers(Dataset):
    def __init__(self, n: int = 11) -> None:
        self.n = n
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.fetched += index if isinstance(index, list) else [index]
        return torch.tensor(index)


class Stream(IterableDataset):
    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


class Epochs(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * 100, self.epoch * 100 + 11))


def values(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def plain_loaders() -> dict[str, DataLoader]:
    return {
        "map": DataLoader(Numbers(), 2),
        "workers": DataLoader(Numbers(), 2, num_workers=1),
        "batches as indices": DataLoader(Numbers(), sampler=BatchSampler(range(11), 2, False), batch_size=None),
        "no batches": DataLoader(Numbers(), batch_size=None),
        "iterable": DataLoader(Stream(), 2),
        "iterable, no batches": DataLoader(Stream(), batch_size=None),
        "dropping": DataLoader(Numbers(), 2, drop_last=True),
        "own batches": DataLoader(Numbers(), batch_sampler=[[3], [1, 2], [9, 4, 5]]),
    }


HOW = ["plain", "prepared", "shard", "split", "dispatched"]


@pytest.mark.parametrize(
    ("name", "how"),
    # batches without a batch size cannot be filled up
    [(name, how) for name in plain_loaders() for how in HOW if name != "own batches" or how not in ("shard", "split")],
)
def test_the_rest_of_an_epoch(name: str, how: str) -> None:
    loader: Any = plain_loaders()[name]
    if how == "prepared":
        loader = prepare_data_loader(loader)
    elif how in ("shard", "split"):
        loader = prepare_data_loader(loader, num_processes=2, process_index=1, split_batches=how == "split")
    elif how == "dispatched":
        loader = prepare_data_loader(loader, put_on_device=True, dispatch_batches=True)
    whole = values(loader)
    assert len(whole) == len(loader)
    for skip in (0, 1, 3, len(whole), len(whole) + 5):
        rest = skip_first_batches(loader, skip)
        assert isinstance(rest, DataLoader)
        assert values(rest) == whole[skip:], skip
        assert len(rest) == len(whole[skip:]), skip
        again = skip_first_batches(rest, 1)
        assert values(again) == whole[skip + 1 :], skip
        assert len(again) == len(whole[skip + 1 :]), skip
    assert values(loader) == whole  # the loader itself skips nothing


def test_nothing_of_the_skipped_is_fetched() -> None:
    for processes in (None, 1, 2):
        dataset = Numbers()
        loader: Any = DataLoader(dataset, 2)
        if processes is not None:
            loader = prepare_data_loader(loader, num_processes=processes, process_index=0)
        list(skip_first_batches(loader, 2))
        first = 4 * (processes or 1)
        assert min(i for i in dataset.fetched if i != 0 and i != 1) == first  # 0 and 1 fill up the end
        list(skip_first_batches(skip_first_batches(loader, 1), 1))
    dataset = Numbers()
    list(skip_first_batches(DataLoader(dataset, sampler=BatchSampler(range(11), 2, False), batch_size=None), 3))
    assert dataset.fetched == [6, 7, 8, 9, 10]


def test_flags_and_repeats_are_those_of_the_epoch() -> None:
    accelerator = Accelerator(cpu=True)
    loader = prepare_data_loader(DataLoader(Numbers(), 2), num_processes=2, process_index=1)
    trace = []
    for batch in accelerator.skip_first_batches(loader, 1):
        active: Any = accelerator.gradient_state.active_dataloader
        trace.append((batch.tolist(), active.end_of_dataloader, active.remainder, active.real_samples))
    assert trace == [([6, 7], False, 3, None), ([10, 0], True, 3, 1)]


@pytest.mark.parametrize("seedable", [False, True])
def test_the_order_is_that_of_the_epoch_and_the_next_one_follows(seedable: bool) -> None:
    def fresh() -> Any:
        torch.manual_seed(5)
        plain = DataLoader(Numbers(), 2, shuffle=True)
        return prepare_data_loader(plain, use_seedable_sampler=seedable, data_seed=5 if seedable else None)

    reference = fresh()
    epochs = [values(reference) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    loader = fresh()
    assert values(loader) == epochs[0]
    assert values(skip_first_batches(loader, 2)) == epochs[1][2:]
    assert values(loader) == epochs[2]


def test_an_epoch_chosen_by_hand() -> None:
    for loader in (
        prepare_data_loader(DataLoader(Numbers(), 2, shuffle=True), use_seedable_sampler=True, data_seed=3),
        prepare_data_loader(DataLoader(Epochs(), 2)),
    ):
        epochs = [values(loader) for _ in range(4)]
        loader.set_epoch(2)
        rest = skip_first_batches(loader, 4)
        assert values(rest) == epochs[2][4:]
        assert values(loader) == epochs[3]
        rest.set_epoch(1)
        assert values(rest) == epochs[1][4:]


def test_a_broken_rest_also_ends_its_epoch() -> None:
    loader = prepare_data_loader(DataLoader(Epochs(), 2))
    for _ in skip_first_batches(loader, 1):
        break
    assert values(loader)[0] == [100, 101]


def test_skip_data_loader() -> None:
    loader = SkipDataLoader(Numbers(), skip_batches=2, batch_size=3)
    assert values(loader) == [[6, 7, 8], [9, 10]] and len(loader) == 2 and isinstance(loader, DataLoader)
    accelerator = Accelerator(cpu=True)
    for _ in loader:
        assert accelerator.gradient_state.active_dataloader is loader
    assert not accelerator.gradient_state.in_dataloader


@pytest.mark.parametrize("dispatched", [False, True])
def test_skipping_far_beyond_the_end_stops_there(dispatched: bool) -> None:
    loader = prepare_data_loader(DataLoader(Stream(), 2), put_on_device=True, dispatch_batches=dispatched)
    assert values(skip_first_batches(loader, 10**12)) == []
    assert len(values(loader)) == 6
