"""Rank 0 reads, every rank gets its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.comm import current
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader, scatter_protocol
from accelerate.state import PartialState
from accelerate.utils import set_seed
from tests.harness import run_world, world_outcomes


class Batches(IterableDataset):
    """Ready-made batches, which only rank 0 may read."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        assert PartialState().is_main_process, "only rank 0 reads"
        for batch in self.batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, range(self.n))


def as_is(batch: Any) -> Any:
    return batch


def dispatched(batches: list[Any], **options: Any) -> DataLoaderDispatcher:
    loader = DataLoader(Batches(batches), batch_size=None, collate_fn=as_is)
    result = prepare_data_loader(loader, put_on_device=True, **options)
    assert type(result) is DataLoaderDispatcher and isinstance(result, DataLoader)
    return result


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[str]


@dataclasses.dataclass
class Record:
    ids: torch.Tensor
    words: list[str]
    note: str = "same for all"


def make(kind: str, start: int, size: int) -> Any:
    ids = torch.arange(start, start + size)
    words = [f"w{i}" for i in ids.tolist()]
    return {
        "tensor": ids,
        "dict": {"ids": ids, "words": words, "temperature": 0.5, "name": "batch"},
        "tuple": (ids, words),
        "namedtuple": Pair(ids, words),
        "dataclass": Record(ids, words),
        "nested": {"a": [ids, {"b": (ids.float(), words)}], "scalar": torch.tensor(3.5), "none": None},
        "strings": words,
        # not collated at all: a row of its own length, or a label, for each sample
        "rows": [{"row": torch.full((i % 3 + 1,), i), "id": i} for i in ids.tolist()],
        "labelled": [(torch.full((2,), i), i) for i in ids.tolist()],
        "two dicts": [{"ids": ids, "words": words}, {"more": ids}],
    }[kind]


def ids_of(batch: Any) -> list[int]:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, Record):
        assert batch.note == "same for all"
        return consistent(batch.ids, batch.words)
    if isinstance(batch, list) and isinstance(batch[-1], dict) and "more" in batch[-1]:
        assert batch[1]["more"].tolist() == batch[0]["ids"].tolist()
        return consistent(**batch[0])
    if isinstance(batch, list) and isinstance(batch[0], dict):
        assert [sample["row"].tolist() for sample in batch] == [[s["id"]] * (s["id"] % 3 + 1) for s in batch]
        return [sample["id"] for sample in batch]
    if isinstance(batch, list) and isinstance(batch[0], tuple):
        assert [row.tolist() for row, _ in batch] == [[i, i] for _, i in batch]
        return [i for _, i in batch]
    if isinstance(batch, dict) and "a" in batch:
        assert batch["scalar"].item() == 3.5 and batch["none"] is None
        floats, words = batch["a"][1]["b"]
        assert floats.tolist() == batch["a"][0].tolist()
        return consistent(batch["a"][0], words)
    if isinstance(batch, dict):
        assert batch["temperature"] == 0.5 and batch["name"] == "batch"
        return consistent(batch["ids"], batch["words"])
    if isinstance(batch, tuple):
        return consistent(*batch)
    return [int(word[1:]) for word in batch]


def consistent(ids: torch.Tensor, words: list[str]) -> list[int]:
    assert words == [f"w{i}" for i in ids.tolist()]
    return ids.tolist()


KINDS = [
    "tensor",
    "dict",
    "tuple",
    "namedtuple",
    "dataclass",
    "nested",
    "strings",
    "rows",
    "labelled",
    "two dicts",
]


def every_kind_of_batch() -> None:
    accelerator = Accelerator()
    processes, rank = accelerator.num_processes, accelerator.process_index
    # (sizes of the batches, whether one batch is split): growing, shrinking, uneven ends, one batch, none at all
    cases = [
        ([4, 4, 4, 4, 4, 4], False),
        ([4, 4, 4, 2], False),
        ([4], False),
        ([1], False),
        ([], False),
        ([1, 1, 500, 500, 500, 3, 3, 3, 1], False),
        ([processes * 2] * 3, True),
        ([processes * 2, 1], True),
        ([processes * 200, processes, processes * 1000, 2], True),
    ]
    for sizes, split in cases:
        for kind in KINDS if max(sizes, default=0) < 100 else KINDS[:7]:
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            batches = [make(kind, start, size) for start, size in zip(starts, sizes, strict=True)]
            loader = dispatched(batches, split_batches=split)
            case = (sizes, split, kind)
            for _ in range(2):
                seen: list[int] = []
                steps = 0
                for batch in loader:
                    assert type(batch) is type(batches[0]), case
                    ids = ids_of(batch)
                    real = len(ids) if loader.real_samples is None else loader.real_samples
                    seen += ids[:real]
                    steps += 1
                per_step = 1 if split else processes
                assert steps == -(-len(sizes) // per_step), case
                everyone = accelerator._communicator.gather_objects(seen)
                assert sorted(i for ids in everyone for i in ids) == list(range(sum(sizes))), case
                if sizes == [4] * 6:
                    own = [i for number in range(rank, 6, processes) for i in range(4 * number, 4 * number + 4)]
                    assert seen == own, case


@pytest.mark.parametrize("processes", [2, 3])
def test_every_kind_of_batch_arrives_whole(processes: int) -> None:
    run_world(every_kind_of_batch, processes)


def anything_may_change_between_batches() -> None:
    """Structure, dtype and shape; values that are equal but not the same; arrays, which cannot be compared."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    steps: list[list[Any]] = [
        [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 3) * 2}],
        [{"x": torch.ones(2, 3), "k": 1}, {"x": torch.ones(2, 3), "k": 1}],
        [{"x": torch.ones(2, 3), "k": True}, {"x": torch.ones(2, 3), "k": 1.0}],
        [(torch.zeros(2, dtype=torch.bool), np.arange(3)), (torch.ones(2, dtype=torch.bool), np.arange(4))],
        [(torch.zeros(2, dtype=torch.bool), np.arange(3)), (torch.ones(2, dtype=torch.bool), np.arange(4))],
        [torch.zeros(2, 0), torch.zeros(2, 0, 4)],
        [torch.arange(12).reshape(3, 4).T, torch.arange(8).reshape(2, 4).T],  # not contiguous
        [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64) * 1j],
        [torch.ones(2, 5, requires_grad=True), torch.ones(2, 7)],  # padded to different lengths
    ]
    seen = list(dispatched([batch for step in steps for batch in step]))
    assert len(seen) == len(steps)
    for number, batch in enumerate(seen):
        same(batch, steps[number][rank])


def same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, tuple):
        for item, wanted in zip(got, expected, strict=True):
            same(item, wanted)
    else:
        assert np.array_equal(got, expected)


def padded_to_different_lengths() -> None:
    """A collate function that pads to the longest of its batch works to the very end."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    widths = [5, 7, 3]
    batches = [{"x": torch.full((4, w), float(w)), "id": torch.arange(4) + 4 * i} for i, w in enumerate(widths)]
    batches[2] = {"x": torch.full((3, 3), 3.0), "id": torch.tensor([8, 9, 10])}
    for split in (False, True):
        seen: list[int] = []
        loader = dispatched(batches, split_batches=split)
        for number, batch in enumerate(loader):
            seen += accelerator.gather_for_metrics(batch["id"]).tolist()
            if not split and number == 0:
                assert batch["x"].shape == (4, widths[rank])
        assert sorted(seen) == list(range(11)), seen
    # an incomplete step of batches that do not fit together
    uneven = [{"x": torch.zeros(n, w), "id": torch.full((n,), w)} for n, w in [(4, 5), (2, 7)]]
    got = list(dispatched(uneven))
    assert [tuple(batch["x"].shape) for batch in got] == [[(4, 5)], [(2, 7)]][rank]


def staying_in_step() -> None:
    accelerator = Accelerator()
    rank, processes = accelerator.process_index, accelerator.num_processes
    loader = accelerator.prepare(DataLoader(Stream(24), batch_size=2))
    assert type(loader) is DataLoaderDispatcher
    for breaks in (1, 3, 2):
        for step, batch in enumerate(loader):
            assert batch.tolist() == [(step * processes + rank) * 2, (step * processes + rank) * 2 + 1]
            if step + 1 == breaks:
                break
        assert not accelerator.gradient_state.in_dataloader
    assert len(list(loader)) == len(loader) == 12 // processes

    # two loaders at once, one inside the other, and the same one inside itself
    other = accelerator.prepare(DataLoader(Stream(12), batch_size=2))
    for step, batch in enumerate(loader):
        assert sum(len(inner) for inner in other) == 6 // processes * 2
        assert batch[0].item() == (step * processes + rank) * 2
    outer = [batch.tolist() for batch in other for _ in range(len(list(other)))]
    assert len(outer) == len(other) ** 2

    # the last batch is known while it is being processed
    flags = []
    for _ in loader:
        flags.append((loader.end_of_dataloader, accelerator.gradient_state.end_of_dataloader))
    assert flags == [(False, False)] * (len(loader) - 1) + [(True, True)]


def contents_on_their_own() -> None:
    """As between GPUs, where the contents of a batch follow its header over the devices' links."""
    Accelerator()
    current().fast_device = torch.device("cpu")
    scatter_protocol._LARGE = 1
    anything_may_change_between_batches()
    padded_to_different_lengths()
    staying_in_step()


def test_contents_may_travel_apart_from_their_header() -> None:
    run_world(contents_on_their_own, 2)


def dropping_the_rest() -> None:
    processes = PartialState().num_processes
    for n in range(14):
        for size in (1, 2, 3):
            plain = DataLoader(Stream(n), size, drop_last=True)
            loader = prepare_data_loader(plain, put_on_device=True)
            got = [batch.tolist() for batch in loader]
            assert len(got) == len(loader) == n // size // processes
            assert all(len(batch) == size for batch in got) and loader.remainder in (-1, size * processes)
        whole = DataLoader(Stream(n), processes * 2, drop_last=True)
        got = [batch.tolist() for batch in prepare_data_loader(whole, put_on_device=True, split_batches=True)]
        assert len(got) == n // (processes * 2) and all(len(batch) == 2 for batch in got)


class ByIndex:
    """A map-style dataset that only rank 0 may read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: Any) -> Any:
        assert PartialState().is_main_process
        return torch.tensor(index)


def shuffled_map_style() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    torch.manual_seed(accelerator.process_index)
    for seedable in (False, True):
        loader = prepare_data_loader(
            DataLoader(ByIndex(), 2, shuffle=True),
            put_on_device=True,
            dispatch_batches=True,
            use_seedable_sampler=seedable,
            data_seed=3,
        )
        orders = []
        for _ in range(2):
            seen: list[int] = []
            for batch in loader:
                seen += accelerator.gather_for_metrics(batch).tolist()
            assert sorted(seen) == list(range(24))
            orders.append(seen)
        assert orders[0] != orders[1]
        # broken off: another order next time
        first = next(iter(loader)).tolist()
        assert next(iter(loader)).tolist() != first
    batches = DataLoader(ByIndex(), sampler=BatchSampler(range(24), 3, False), batch_size=None)
    seen = [i for batch in accelerator.prepare(batches) for i in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(seen) == list(range(24))


def own_slices() -> None:
    accelerator = Accelerator()
    calls: list[tuple[int, int]] = []

    def every_other(batch: Any, tensor_slice: slice, process_index: int, num_processes: int) -> Any:
        calls.append((process_index, num_processes))
        assert tensor_slice == slice(process_index * 2, process_index * 2 + 2)
        return batch[process_index::num_processes]

    loader = accelerator.prepare_data_loader(DataLoader(Stream(8), 2), slice_fn_for_dispatch=every_other)
    got = [batch.tolist() for batch in loader]
    rank = accelerator.process_index
    assert got == [[rank, rank + 2], [rank + 4, rank + 6]]
    assert calls == ([(0, 2), (1, 2)] * 2 if rank == 0 else [])


def skipping() -> None:
    accelerator = Accelerator()
    processes = accelerator.num_processes
    for split in (False, True):
        for dataset in (Stream(26), torch.arange(26)):
            loader = prepare_data_loader(
                DataLoader(dataset, processes * 2), put_on_device=True, dispatch_batches=True, split_batches=split
            )
            whole = [batch.tolist() for batch in loader]
            for skip in range(len(whole) + 2):
                rest = accelerator.skip_first_batches(loader, skip)
                assert [batch.tolist() for batch in rest] == whole[skip:], (split, skip)
                assert len(rest) == len(whole[skip:]), (split, skip, type(dataset))
                twice = accelerator.skip_first_batches(accelerator.skip_first_batches(loader, 1), skip)
                assert [batch.tolist() for batch in twice] == whole[1 + skip :]


def test_what_may_happen_in_a_loop() -> None:
    for function in (
        anything_may_change_between_batches,
        padded_to_different_lengths,
        staying_in_step,
        dropping_the_rest,
        shuffled_map_style,
        own_slices,
        skipping,
    ):
        run_world(function, 2)
    run_world(staying_in_step, 3)
    run_world(staying_in_step, 2, env={"ACCELERATE_DEBUG_MODE": "1"})
    run_world(dropping_the_rest, 3)


def an_error_while_reading(good: int, text: str) -> None:
    Accelerator()
    batches: list[Any] = [torch.ones(2)] * good + [KeyError(text)]
    for _ in dispatched(batches):
        pass


@pytest.mark.parametrize(("good", "text"), [(0, "no such file"), (5, "no such file"), (4, "long " * 2000)])
def test_an_error_on_rank_0_reaches_everyone(good: int, text: str) -> None:
    outcomes = world_outcomes(an_error_while_reading, 3, good, text, grace=20)
    assert [outcome.error for outcome in outcomes] == ["KeyError", "RuntimeError", "RuntimeError"]
    for outcome in outcomes[1:]:
        assert outcome.message.startswith("Rank 0 could not read the next batch for all ranks (KeyError: ")
        assert text in outcome.message


def a_batch_that_cannot_be_cut() -> None:
    Accelerator()
    rows = next(iter(dispatched([[torch.ones(1), torch.ones(2)], [torch.ones(3), torch.ones(3)]])))
    assert [len(row) for row in rows] in ([1, 2], [3, 3])
    list(dispatched([{"a": 1}, {"a": 2}, {"a": 3}]))


def a_batch_that_cannot_travel() -> None:
    Accelerator()
    list(dispatched([{"x": torch.ones(2), "f": lambda: None}] * 2))


def test_bad_batches_are_errors_on_every_rank() -> None:
    outcomes = world_outcomes(a_batch_that_cannot_be_cut, 2, grace=20)
    assert [outcome.error for outcome in outcomes] == ["TypeError", "RuntimeError"]
    assert "cannot be split over 2 ranks" in outcomes[0].message and "cannot be split" in outcomes[1].message
    outcomes = world_outcomes(a_batch_that_cannot_travel, 2, grace=20)
    assert outcomes[0].error in ("PicklingError", "AttributeError") and outcomes[1].error == "RuntimeError"


def test_dispatching_needs_device_placement() -> None:
    with pytest.raises(ValueError, match="put_on_device=True"):
        prepare_data_loader(DataLoader(Stream(4), 2), dispatch_batches=True)


def test_one_process_is_a_plain_loop() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(5), 2))
    flags = []
    for batch in loader:
        flags.append((batch.tolist(), loader.end_of_dataloader, loader.remainder))
    assert flags == [([0, 1], False, -1), ([2, 3], False, -1), ([4], True, 1)]


class Lists(Dataset):
    """Takes the indices of a batch."""

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def samples_of_a_run(folder: str, start: int, kind: str) -> list[Any]:
    config = DataLoaderConfiguration(dispatch_batches=True, exact_resume=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(5)
    if kind == "lists":
        batches = BatchSampler(RandomSampler(range(23)), 2, False)
        plain: Any = DataLoader(Lists(), batch_size=None, sampler=batches)
    else:
        collate = jittered if kind == "draws" else None
        plain = DataLoader(list(range(23)), batch_size=2, shuffle=True, collate_fn=collate)
    loader = accelerator.prepare(plain)
    if start:
        accelerator.load_state(folder)
    seen: list[Any] = []
    for _ in range(loader.iteration, 2):
        for batch in loader:
            seen.append(batch.tolist())
            if start + len(seen) == 3:
                accelerator.save_state(folder)
    return [*seen, torch.rand(1).item()]


def jittered(samples: list[int]) -> torch.Tensor:
    torch.rand(1)
    return torch.tensor(samples)


@pytest.mark.parametrize("kind", ["plain", "draws", "lists"])
def test_after_a_restart_the_same_samples_fill_up_the_last_step(tmp_path: Path, kind: str) -> None:
    whole = run_world(samples_of_a_run, 2, str(tmp_path / "x"), 0, kind)
    assert run_world(samples_of_a_run, 2, str(tmp_path / "x"), 3, kind) == [seen[3:] for seen in whole]
