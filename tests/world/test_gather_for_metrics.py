"""Evaluation loops on several processes: exactly one value per sample, whatever the loader and the value."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from tests.harness import run_world


class Numbers(Dataset):
    """Sample i is the number i; a list of indices gives a batch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


class Stream(IterableDataset):
    """The same numbers, without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, range(self.n))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class Shifting(BatchSampler):
    """Batches of `size`, `size - 1`, `size`, ... samples: short ones in the middle."""

    def __init__(self, n: int, size: int) -> None:
        self.n, self.batch_size, self.drop_last = n, size, False
        self.sampler = range(n)

    def __iter__(self) -> Iterator[list[int]]:
        start, short = 0, False
        while start < self.n:
            size = max(self.batch_size - short, 1)
            yield list(range(start, min(start + size, self.n)))
            start, short = start + size, not short

    def __len__(self) -> int:
        return sum(1 for _ in self)


def loaders(n: int, size: int, processes: int, rank: int) -> Iterator[tuple[str, Any]]:
    def prepared(loader: DataLoader, **options: Any) -> Any:
        return prepare_data_loader(loader, put_on_device=True, device=torch.device("cpu"), **options)

    def distributed(shuffle: bool, drop_last: bool) -> Any:
        return DistributedSampler(Numbers(n), processes, rank, shuffle=shuffle, drop_last=drop_last)

    yield "map", prepared(DataLoader(Numbers(n), size))
    yield "map, shuffled", prepared(DataLoader(Numbers(n), size, shuffle=True), rng_types=["generator"])
    yield "uneven", prepared(DataLoader(Numbers(n), size), even_batches=False)
    yield "iterable", prepared(DataLoader(Stream(n), size), dispatch_batches=False)
    yield "iterable with a length", prepared(DataLoader(SizedStream(n), size), dispatch_batches=False)
    yield "dispatched", prepared(DataLoader(Stream(n), size))
    yield "dispatched map", prepared(DataLoader(Numbers(n), size), dispatch_batches=True)
    yield "short in the middle", prepared(DataLoader(Numbers(n), batch_sampler=Shifting(n, size)))
    if size == 1:
        yield "no batches", prepared(DataLoader(Numbers(n), batch_size=None))
        yield "no batches, iterable", prepared(DataLoader(Stream(n), batch_size=None), dispatch_batches=False)
    batches = BatchSampler(range(n), size, False)
    yield "batches as indices", prepared(DataLoader(Numbers(n), sampler=batches, batch_size=None))
    if size % processes == 0:
        yield "split", prepared(DataLoader(Numbers(n), size), split_batches=True)
        yield "split uneven", prepared(DataLoader(Numbers(n), size), split_batches=True, even_batches=False)
        yield "split iterable", prepared(DataLoader(Stream(n), size), split_batches=True, dispatch_batches=False)
        yield "split dispatched", prepared(DataLoader(Stream(n), size), split_batches=True)
        shifting = DataLoader(Numbers(n), batch_sampler=Shifting(n, size))
        yield "split, short in the middle", prepared(shifting, split_batches=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "it is not sharded again"
        yield "distributed", prepared(DataLoader(Numbers(n), size, sampler=distributed(False, False)))
        yield "distributed, shuffled", prepared(DataLoader(Numbers(n), size, sampler=distributed(True, False)))
        batch_sampler = BatchSampler(distributed(False, False), size, False)
        yield "distributed batch sampler", prepared(DataLoader(Numbers(n), batch_sampler=batch_sampler))
        if size == 1:
            alone = DataLoader(Numbers(n), batch_size=None, sampler=distributed(False, False))
            yield "distributed, no batches", prepared(alone)


def every_sample_once(sizes: list[int], lengths: list[int]) -> None:
    accelerator = Accelerator()
    processes, rank = accelerator.num_processes, accelerator.process_index
    for n in lengths:
        for size in sizes:
            for name, loader in loaders(n, size, processes, rank):
                if "uneven" in name:
                    # ranks have different numbers of batches: only what is handed out counts
                    own = [value for batch in loader for value in batch.reshape(-1).tolist()]
                    everyone = [value for values in accelerator._communicator.gather_objects(own) for value in values]
                    assert sorted(everyone) == list(range(n)), (name, n, size)
                    continue
                for epoch in range(2):
                    seen: list[int] = []
                    for batch in loader:
                        seen += accelerator.gather_for_metrics(batch).reshape(-1).tolist()
                    assert sorted(seen) == list(range(n)), (name, n, size, epoch, seen)
                    assert not accelerator.gradient_state.in_dataloader


@pytest.mark.parametrize(
    ("processes", "sizes", "lengths"),
    [(1, [1, 3], [1, 5]), (2, [1, 2, 4], [1, 2, 3, 5, 8, 11, 17]), (3, [1, 3], [1, 2, 4, 6, 17])],
)
def test_every_loader_gives_each_sample_once(processes: int, sizes: list[int], lengths: list[int]) -> None:
    run_world(every_sample_once, processes, sizes, lengths)


class Output(NamedTuple):
    label: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class Record:
    label: torch.Tensor
    words: list[str]


def every_kind_of_value(n: int, size: int) -> None:
    accelerator = Accelerator()
    processes = accelerator.num_processes
    gather = accelerator.gather_for_metrics
    for dispatch in (False, True):
        loader = accelerator.prepare_data_loader(DataLoader(Numbers(n), size))
        if dispatch:
            loader = prepare_data_loader(DataLoader(Numbers(n), size), put_on_device=True, dispatch_batches=True)
        found: dict[str, list[Any]] = {}

        def note(name: str, values: Any, found: dict[str, list[Any]] = found) -> None:
            found.setdefault(name, []).extend(values.tolist() if isinstance(values, torch.Tensor) else values)

        for batch in loader:
            words = [f"w{i}" for i in batch.tolist()]
            note("tensor", gather(batch))
            note("dict", gather({"a": {"b": batch}})["a"]["b"])
            nested = gather([batch, (batch * 2, {"c": batch * 3})])
            note("nested", nested[0])
            note("nested twice", nested[1][0])
            note("nested thrice", nested[1][1]["c"])
            output = gather(Output(batch, batch[:, None].repeat(1, 5)))
            assert type(output) is Output and output.scores.shape == (len(output.label), 5)
            note("namedtuple", output.label)
            note("strings", gather(words))
            note("objects", gather(words, use_gather_object=True))
            objects = gather([{"w": word} for word in words], use_gather_object=True)
            note("objects of any kind", [item["w"] for item in objects])
            mixed = gather({"id": batch, "word": words})
            note("mixed ids", mixed["id"])
            note("mixed words", mixed["word"])
            pairs = gather((words, words))
            note("lists in a tuple", [word for entry in pairs[::2] for word in entry])
            note("samples", [item["id"] for item in gather([{"id": i, "x": torch.ones(i)} for i in batch.tolist()])])
            note("a list beside nothing", gather((words, None))[0])
            note("a tuple beside nothing", gather((tuple(words), None))[0])
            inside = gather({"id": batch, "texts": (words, words, None)})["texts"]
            note("lists in a larger structure", inside[0])
            note("the second of them", inside[1])
            record = gather(Record(batch, words))
            note("dataclass", record.label)
            note("words of a dataclass", record.words)
            note("a mapping of its own kind", gather(defaultdict(list, ids=batch, words=words))["ids"])
            note("a column", gather(torch.stack([batch, batch], dim=1)[:, 1]))
            note("array", gather(batch.numpy()))
            note("array in a dict", gather({"a": batch.numpy(), "b": 1})["a"])
            assert gather({"b": accelerator.process_index})["b"] == list(range(processes))
            note("two per sample", gather(torch.stack([batch * 2, batch * 2 + 1], dim=1).flatten()))
            # a value without dimension: one of every rank, on every step
            single = gather(torch.tensor(float(accelerator.process_index)))
            assert single.tolist() == [float(rank) for rank in range(processes)], (n, size)
            # rows of different lengths between ranks, padded
            width = accelerator.process_index + 1
            padded = accelerator.pad_across_processes(batch[:, None].repeat(1, width), dim=1, pad_index=-1)
            rows = gather(padded)
            assert rows.shape[1] == processes
            note("ragged", rows[:, 0])
        for name, values in found.items():
            factor = {"nested twice": 2, "nested thrice": 3}.get(name, 1)
            if isinstance(values[0], str):
                values = [int(word[1:]) for word in values]
            count = 2 * n if name == "two per sample" else n
            assert Counter(values) == {i * factor: 1 for i in range(count)}, (name, n, size, dispatch, values)
        assert len(found) == 25


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(("n", "size"), [(1, 4), (5, 4), (9, 2), (7, 1), (8, 4), (13, 3)])
def test_every_kind_of_value_is_exact(processes: int, n: int, size: int) -> None:
    run_world(every_kind_of_value, processes, n, size)


def distributed_sampler_that_drops() -> None:
    """What the sampler or the loader leaves out stays out; nothing comes twice."""
    accelerator = Accelerator()
    processes, rank = accelerator.num_processes, accelerator.process_index
    for n in range(1, 14):
        for size in (1, 2, 3):
            for sampler_drops in (False, True):
                for loader_drops in (False, True):
                    sampler = DistributedSampler(Numbers(n), processes, rank, shuffle=True, drop_last=sampler_drops)
                    with pytest.warns(UserWarning, match="DistributedSampler already gives each of the 2 processes"):
                        loader = accelerator.prepare(
                            DataLoader(Numbers(n), size, sampler=sampler, drop_last=loader_drops)
                        )
                    seen: list[int] = []
                    for batch in loader:
                        seen += accelerator.gather_for_metrics(batch).tolist()
                    case = (n, size, sampler_drops, loader_drops, seen)
                    assert len(seen) == len(set(seen)), case
                    per_rank = n // processes if sampler_drops else -(-n // processes)
                    used = per_rank // size * size if loader_drops else per_rank
                    assert len(seen) == min(used * processes, n), case


def test_a_distributed_sampler_is_exact_with_what_is_dropped() -> None:
    run_world(distributed_sampler_that_drops, 2)


class Packed:
    """A collate function whose first tensor says nothing about the number of samples."""

    def __call__(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"lengths": torch.ones(1, 7), "ids": torch.stack(samples)}


def the_sampler_knows_the_size() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(5), 4, collate_fn=Packed()))
    seen: list[int] = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch["ids"]).tolist()
    assert sorted(seen) == list(range(5))


def outside_any_loader() -> None:
    accelerator = Accelerator()
    rank, processes = accelerator.process_index, accelerator.num_processes
    mine = torch.arange(3) + 10 * rank
    everything = [i + 10 * r for r in range(processes) for i in range(3)]
    assert accelerator.gather_for_metrics(mine).tolist() == accelerator.gather(mine).tolist() == everything
    assert accelerator.gather_for_metrics([f"r{rank}"]) == [f"r{r}" for r in range(processes)]
    # also right after a loop, and after one that was broken off in its last batch
    loader = accelerator.prepare(DataLoader(Numbers(5), 4))
    assert len(list(loader)) == 1
    assert accelerator.gather_for_metrics(mine).tolist() == everything
    for _ in loader:
        if accelerator.gradient_state.end_of_dataloader:
            break
    assert accelerator.gather_for_metrics(mine).tolist() == everything
    # a loader inside another: each has its own repeats
    outer = accelerator.prepare(DataLoader(Numbers(5), 4))
    outer_seen: list[int] = []
    for batch in outer:
        inner_seen: list[int] = []
        for inner in loader:
            inner_seen += accelerator.gather_for_metrics(inner).tolist()
        assert sorted(inner_seen) == list(range(5))
        outer_seen += accelerator.gather_for_metrics(batch).tolist()
    assert sorted(outer_seen) == list(range(5))


def lists_of_unequal_length() -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    mine = [] if rank == 0 else ["a", "b"]
    assert accelerator.gather_for_metrics(mine) == ["a", "b"]
    gathered = accelerator.gather_for_metrics({"x": torch.arange(rank), "s": mine})
    assert gathered["s"] == ["a", "b"] and gathered["x"].tolist() == [0]
    assert accelerator.gather_for_metrics(mine, use_gather_object=True) == ["a", "b"]


def test_debug_mode_knows_that_the_last_lengths_differ() -> None:
    run_world(every_kind_of_value, 2, 5, 4, env={"ACCELERATE_DEBUG_MODE": "1"})


def test_special_cases() -> None:
    for function in (the_sampler_knows_the_size, outside_any_loader, lists_of_unequal_length):
        run_world(function, 2)


def test_one_process_returns_the_object_itself() -> None:
    accelerator = Accelerator(cpu=True)
    for value in (torch.ones(3), {"a": torch.ones(1)}, ["x"], torch.tensor(1.0), 3):
        assert accelerator.gather_for_metrics(value) is value
    # also in the last batch, which is smaller
    for batch in accelerator.prepare(DataLoader(Numbers(3), 2)):
        words = [str(i) for i in batch.tolist()]
        assert accelerator.gather_for_metrics({"n": 1, "words": words}) == {"n": 1, "words": words}
        assert accelerator.gather_for_metrics(Record(batch, words)).words == words


class Logged(dict[str, Any]):
    """A dict that cannot be built from its items."""

    def __init__(self, *, name: str, values: torch.Tensor) -> None:
        super().__init__({name: values})


def test_one_process_leaves_a_container_as_it_is_that_cannot_be_built_from_its_items() -> None:
    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(DataLoader(Numbers(3), 2)):
        for value in (Logged(name="x", values=batch), batch.to_sparse()):
            assert accelerator.gather_for_metrics(value) is value


def values_for_a_full_batch() -> dict[str, list[int]]:
    """As transformers' Trainer does it: one loss per sample that a full batch has, whatever the batch at hand has."""
    found = {}
    for name, config in {
        "sharded": {},
        "dispatched": {"dispatch_batches": True},
        "uneven": {"even_batches": False},
    }.items():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=3))
        lengths = []
        for batch in loader:
            if name == "uneven" and accelerator.num_processes > 1:
                continue  # ranks differ in the number of their batches
            lengths.append(len(accelerator.gather_for_metrics(batch.float().mean().repeat(3))))
        found[name] = lengths
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_values_for_a_full_batch_count_the_samples_there_are(processes: int) -> None:
    for found in run_world(values_for_a_full_batch, processes):
        for name, lengths in found.items():
            assert sum(lengths) == 10 or (name == "uneven" and not lengths), (name, lengths)


def two_equal_values_for_each_sample() -> dict[str, int]:
    """Nothing but their number tells them from one value for each sample of a full batch."""
    found = {}
    for name, dataset in {"map": Numbers(10), "stream": Stream(11), "stream with a length": SizedStream(11)}.items():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(dataset, batch_size=4))
        found[name] = 0
        for batch in loader:
            found[name] += len(accelerator.gather_for_metrics(torch.zeros(2 * len(batch))))
        alone = accelerator.prepare(DataLoader(SizedStream(2), batch_size=4))
        found[name + ", in one batch"] = sum(
            len(accelerator.gather_for_metrics({"a": torch.zeros(2 * len(batch))})["a"]) for batch in alone
        )
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_two_equal_values_for_each_sample_of_a_short_last_batch_are_both_kept(processes: int) -> None:
    for found in run_world(two_equal_values_for_each_sample, processes):
        alone = {name: 4 for name in found if name.endswith("one batch")}
        assert found == {"map": 20, "stream": 22, "stream with a length": 22} | alone
