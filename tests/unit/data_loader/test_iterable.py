"""One process's share of an iterable dataset."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate.data_loader import IterableDatasetShard, prepare_data_loader


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Sized(Stream):
    def __len__(self) -> int:
        return self.n


class ByWorker(Stream):
    """Each worker reads its own part, as torch asks of iterable datasets."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))


def reference(n: int, piece: int, processes: int, drop_last: bool) -> list[list[int]]:
    row = piece * processes
    samples = list(range(n))
    if n % row:
        # fill up with the first row again and again, or cut
        first_row = samples[:row]
        missing = -n % row
        fill = [first_row[i % len(first_row)] for i in range(missing)]
        samples = samples[: n // row * row] if drop_last else samples + fill
    return [[s for i, s in enumerate(samples) if i % row // piece == rank] for rank in range(processes)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_every_rank_gets_its_share(split: bool, drop_last: bool) -> None:
    for n, size, processes in itertools.product(range(21), (1, 2, 3, 4, 6), (1, 2, 3, 4)):
        if split and size % processes:
            continue
        shards = [IterableDatasetShard(Sized(n), size, drop_last, processes, r, split) for r in range(processes)]
        expected = reference(n, size // processes if split else size, processes, drop_last)
        assert [list(shard) for shard in shards] == expected, (n, size, processes)
        assert [len(shard) for shard in shards] == [len(samples) for samples in expected], (n, size, processes)


def test_split_batches_wants_a_divisible_batch_size() -> None:
    with pytest.raises(ValueError, match="multiple of the 2 processes, but it is 3"):
        IterableDatasetShard(Stream(4), batch_size=3, num_processes=2, split_batches=True)


def test_without_a_length() -> None:
    with pytest.raises(TypeError):
        len(IterableDatasetShard(Stream(4)))


class Shuffled(Sized):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


class Epochs(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * 100, self.epoch * 100 + self.n))


def test_a_generator_follows_the_epoch() -> None:
    shards = [IterableDatasetShard(Shuffled(8), 2, False, 2, rank) for rank in range(2)]
    orders = []
    for epoch in range(2):
        for shard in shards:
            shard.set_epoch(epoch)
        parts = [list(shard) for shard in shards]
        assert sorted(parts[0] + parts[1]) == list(range(8))
        orders.append(parts)
    assert orders[0] != orders[1]
    expected = torch.randperm(8, generator=torch.Generator().manual_seed(1)).tolist()
    assert orders[1][0] == expected[0:2] + expected[4:6]


def test_set_epoch_reaches_the_dataset() -> None:
    shard = IterableDatasetShard(Epochs(4), 1, False, 2, 1)
    shard.set_epoch(3)
    assert list(shard) == [301, 303]
    loader = prepare_data_loader(DataLoader(Epochs(2), batch_size=1), num_processes=2, process_index=0)
    assert [[int(batch) for batch in loader] for _ in range(3)] == [[0], [100], [200]]


def per_rank(dataset: Any, **options: Any) -> list[Any]:
    sharding = {name: options.pop(name) for name in ("split_batches",) if name in options}
    return [
        prepare_data_loader(DataLoader(dataset, **options), num_processes=2, process_index=rank, **sharding)
        for rank in range(2)
    ]


def real_samples(loader: Any) -> list[int]:
    """The samples of a loader without the repeats."""
    seen: list[int] = []
    for batch in loader:
        values = batch.reshape(-1).tolist() if isinstance(batch, torch.Tensor) else [batch]
        if loader.real_samples is not None:
            assert loader.batch_samples == len(values)
        seen += values if loader.real_samples is None else values[: loader.real_samples]
    return seen


@pytest.mark.parametrize("n", [1, 5, 8, 11])
def test_workers_that_share_the_data_give_each_sample_once(n: int) -> None:
    loaders = per_rank(ByWorker(n), batch_size=2, num_workers=2)
    assert sorted(real_samples(loaders[0]) + real_samples(loaders[1])) == list(range(n))


def test_workers_that_do_not_share_the_data_repeat_it_as_plain_torch_does() -> None:
    plain = [i for batch in DataLoader(Stream(8), batch_size=2, num_workers=2) for i in batch.tolist()]
    loaders = per_rank(Stream(8), batch_size=2, num_workers=2)
    assert sorted(real_samples(loaders[0]) + real_samples(loaders[1])) == sorted(plain) == sorted([*range(8)] * 2)


@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_without_batches_each_sample_is_one(n: int) -> None:
    for split in (False, True):
        loaders = per_rank(Stream(n), batch_size=None, split_batches=split)
        counts = [len(list(loader)) for loader in loaders]
        assert counts == [-(-n // 2)] * 2
        assert sorted(real_samples(loaders[0]) + real_samples(loaders[1])) == list(range(n))


def tagged(samples: list[int]) -> dict[str, Any]:
    return {"ids": torch.tensor(samples), "text": [f"s{i}" for i in samples]}


def test_custom_collate_functions_see_plain_samples() -> None:
    loaders = per_rank(Stream(5), batch_size=2, collate_fn=tagged)
    batches = [list(loader) for loader in loaders]
    assert batches[0][1] == {"ids": batches[0][1]["ids"], "text": ["s4", "s0"]}
    assert batches[1][1]["text"] == ["s1", "s2"]


def test_split_batches_reads_pieces() -> None:
    loaders = per_rank(Sized(10), batch_size=4, split_batches=True)
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    assert [len(loader) for loader in loaders] == [3, 3]
    assert [loader.total_batch_size for loader in loaders] == [4, 4]
    assert loaders[0].total_dataset_length == 10


class Sharded(IterableDataset):
    """As a stream of Hugging Face datasets: four samples in each of its shards."""

    def __init__(self, shards: list[int]) -> None:
        self.shards = shards

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Sharded:
        size = len(self.shards) // num_shards
        return Sharded(self.shards[index * size : (index + 1) * size])

    def __iter__(self) -> Iterator[int]:
        return (shard * 10 + number for shard in self.shards for number in range(4))


@pytest.mark.parametrize(
    ("shards", "split_batches", "expected"),
    [
        (2, False, [[10, 11], [12, 13]]),
        (4, False, [[20, 21], [22, 23], [30, 31], [32, 33]]),
        (3, False, [[2, 3], [12, 13], [22, 23]]),  # uneven: everybody reads all of it
        (2, True, [[1], [3], [11], [13]]),
    ],
)
def test_a_stream_that_knows_its_shards(
    monkeypatch: pytest.MonkeyPatch, shards: int, split_batches: bool, expected: list[list[int]]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(IterableDataset=Sharded))  # type: ignore[arg-type]
    loader = DataLoader(Sharded(list(range(shards))), batch_size=2)
    prepared = prepare_data_loader(loader, num_processes=2, process_index=1, split_batches=split_batches)
    assert [batch.tolist() for batch in prepared] == expected
