"""Loaders that can say where they stand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader, torch_loaders

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
# torchdata calls something that torch has deprecated


class Stream(IterableDataset):
    """Keeps its own position, as torchdata asks of iterable datasets."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 11:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def fresh(kind: str, workers: int) -> Any:
    torch.manual_seed(1)
    options: dict[str, Any] = {"use_stateful_dataloader": True}
    if kind == "dispatched":
        return prepare_data_loader(
            DataLoader(torch.arange(11), 2, num_workers=workers), put_on_device=True, dispatch_batches=True, **options
        )
    if kind == "shard":
        options.update(num_processes=2, process_index=1)
    if kind == "iterable":
        return prepare_data_loader(DataLoader(Stream(), 2, num_workers=workers), **options)
    shuffle = kind == "shuffled"
    plain: Any = DataLoader(torch.arange(11), 2, shuffle=shuffle, num_workers=workers)
    return prepare_data_loader(plain, use_seedable_sampler=shuffle, data_seed=4, **options)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "shard", "shuffled", "iterable", "dispatched"])
def test_the_position_is_that_of_the_batch_at_hand(kind: str, workers: int) -> None:
    loader = fresh(kind, workers)
    assert isinstance(loader, torchdata.StatefulDataLoader) and isinstance(loader, DataLoader)
    batches, states = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(copy.deepcopy(loader.state_dict()))
    assert [state["_iterator_finished"] for state in states] == [False] * (len(batches) - 1) + [True]
    for number in range(0, len(batches), 2 if workers else 1):
        resumed = fresh(kind, workers)
        resumed.load_state_dict(states[number])
        trace = [(batch.tolist(), resumed.end_of_dataloader, resumed.real_samples) for batch in resumed]
        rest = batches[number + 1 :] or trace_of_next_epoch(kind, workers)
        assert [values for values, *_ in trace] == rest, number
        if batches[number + 1 :]:
            assert [end for _, end, _ in trace] == [False] * (len(rest) - 1) + [True]
            if kind == "shard":
                assert trace[-1][2] == 1  # 11 samples: the second one of rank 1's last batch is a repeat


def trace_of_next_epoch(kind: str, workers: int) -> list[Any]:
    """A position after the last batch is the start of an epoch."""
    return [batch.tolist() for batch in fresh(kind, workers)]


def test_a_broken_epoch_goes_on_where_it_was() -> None:
    loader = fresh("plain", 0)
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = loader.state_dict()
    resumed = fresh("plain", 0)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[6, 7], [8, 9], [10]]
    assert next(batch.tolist() for batch in resumed) == [0, 1]


def test_the_accelerator_asks_for_it() -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(torch.arange(4), 2))
    assert loader.use_stateful_dataloader and isinstance(loader, torchdata.StatefulDataLoader)
    rest = accelerator.skip_first_batches(loader, 1)
    assert isinstance(rest, torchdata.StatefulDataLoader) and [batch.tolist() for batch in rest] == [[2, 3]]


def test_without_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loaders, "is_torchdata_stateful_dataloader_available", lambda: False)
    with pytest.raises(ImportError, match=r"needs torchdata 0\.8 or later: pip install"):
        prepare_data_loader(DataLoader(torch.arange(4)), use_stateful_dataloader=True)
    assert prepare_data_loader(DataLoader(torch.arange(4))).state_dict() is None
