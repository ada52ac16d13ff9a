"""Which indices each process reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accelerate.data_loader import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.data_loader.indexed import IndexedRandomSampler
from accelerate.data_loader.samplers import leave_out


class GivenBatches(BatchSampler):
    """Exactly these batches; `batch_size` only where one is given."""

    def __init__(self, sizes: list[int], batch_size: int | None = None, drop_last: bool = False) -> None:
        count = itertools.count()
        self.batches = [[next(count) for _ in range(size)] for size in sizes]
        self.drop_last = drop_last
        if batch_size is not None:
            self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def reference(n: int, size: int, processes: int, drop_last: bool, split: bool, even: bool) -> list[list[list[int]]]:
    """The batches of every rank, by the words of the documentation: lay the samples out in rows of one global
    batch, each row cut into one piece per rank."""
    piece = size // processes if split else size
    row = piece * processes
    result: list[list[list[int]]] = [[] for _ in range(processes)]
    for start in range(0, n, row):
        samples = list(range(start, min(start + row, n)))
        if len(samples) < row:
            if drop_last:
                break
            if even:
                first_row = list(range(min(row, n)))
                samples = list(range(start, n)) + [first_row[i % len(first_row)] for i in range(row - (n - start))]
        for rank in range(processes):
            part = samples[rank * piece : (rank + 1) * piece]
            if part:
                result[rank].append(part)
    return result


GRID = [
    (size, processes, drop_last, split, even)
    for size in (1, 2, 3, 4, 6, 8)
    for processes in (1, 2, 3, 4)
    for drop_last in (False, True)
    for split in (False, True)
    for even in (False, True)
    if not split or size % processes == 0
]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_rank_gets_its_share_of_the_batches(processes: int) -> None:
    for n, (size, grid_processes, drop_last, split, even) in itertools.product(range(21), GRID):
        if grid_processes != processes:
            continue
        case = {"n": n, "size": size, "drop_last": drop_last, "split": split, "even": even}
        expected = reference(n, size, processes, drop_last, split, even)
        shards = [
            BatchSamplerShard(BatchSampler(range(n), size, drop_last), processes, rank, split, even)
            for rank in range(processes)
        ]
        for _ in range(2):  # a second iteration is like the first
            assert [list(shard) for shard in shards] == expected, case
        counts = [len(batches) for batches in expected]
        assert [len(shard) for shard in shards] == counts, case
        steps = max(counts)
        assert [shard.missed_steps for shard in shards] == [steps - count for count in counts], case
        assert {shard.uneven for shard in shards} == {len(set(counts)) > 1}, case
        check_counts(shards, expected, n, case)


def check_counts(shards: list[Any], expected: list[list[list[int]]], n: int, case: Any) -> None:
    """Without what `counts` says are repeats, every sample is there at most once."""
    kept: list[int] = []
    for shard, batches in zip(shards, expected, strict=True):
        for number, batch in enumerate(batches):
            counts = shard.counts(number)
            if counts is None:
                kept += batch
            else:
                real, size = counts
                assert size == len(batch) and 0 <= real < size, case
                kept += batch[:real]
    assert sorted(kept) == sorted(set(itertools.chain(*itertools.chain(*expected)))), case
    if not case.get("drop_last"):
        assert sorted(kept) == list(range(n)), case


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_batches_of_changing_size_lose_and_double_nothing(processes: int, even: bool) -> None:
    choose = torch.Generator().manual_seed(processes)
    for _ in range(200):
        length = int(torch.randint(0, 8, (), generator=choose))
        # up to 6 with a nominal size of 4: a batch sampler by tokens may go beyond its nominal size
        sizes = torch.randint(1, 7, (length,), generator=choose).tolist()
        shards = [BatchSamplerShard(GivenBatches(sizes, 4), processes, r, False, even) for r in range(processes)]
        yielded = [list(shard) for shard in shards]
        n = sum(sizes)
        seen = sorted(itertools.chain(*itertools.chain(*yielded)))
        assert set(seen) == set(range(n)), sizes
        if even:
            assert len({len(batches) for batches in yielded}) == 1, sizes
        else:
            assert seen == list(range(n)), sizes
            whole = GivenBatches(sizes).batches
            assert yielded == [whole[rank::processes] for rank in range(processes)]
        check_counts(shards, yielded, n, {"sizes": sizes})
        assert [len(shard) for shard in shards] == [len(batches) for batches in yielded], sizes


def test_short_batches_in_the_middle_are_cut_and_filled_with_split_batches() -> None:
    sizes = [4, 3, 4, 1, 4]
    shards = [BatchSamplerShard(GivenBatches(sizes, 4), 2, rank, True, True) for rank in range(2)]
    yielded = [list(shard) for shard in shards]
    assert yielded[0] == [[0, 1], [4, 5], [7, 8], [11, 0], [12, 13]]
    assert yielded[1] == [[2, 3], [6, 0], [9, 10], [1, 2], [14, 15]]
    check_counts(shards, yielded, 16, {})
    assert [shard.counts(1) for shard in shards] == [None, (1, 2)]
    assert [shard.counts(3) for shard in shards] == [(1, 2), (0, 2)]


def test_a_batch_sampler_without_batch_size_repeats_whole_batches() -> None:
    for sizes, expected in {
        (1, 3, 2, 2): [[[0], [6, 7]], [[1, 2, 3], [0]], [[4, 5], [1, 2, 3]]],
        (2,): [[[0, 1]], [[0, 1]], [[0, 1]]],
        (2, 1, 3): [[[0, 1]], [[2]], [[3, 4, 5]]],
    }.items():
        filled = [BatchSamplerShard(GivenBatches(list(sizes)), 3, rank) for rank in range(3)]
        assert [list(shard) for shard in filled] == expected
        check_counts(filled, expected, sum(sizes), {})
    with pytest.raises(ValueError, match="multiple of the 2 processes, but it is None"):
        BatchSamplerShard(GivenBatches([2, 2]), 2, 0, split_batches=True, even_batches=False)
    shards = [BatchSamplerShard(GivenBatches([2, 3, 1]), 2, rank, even_batches=False) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[[0, 1], [5]], [[2, 3, 4]]]
    assert [shard.missed_steps for shard in shards] == [0, 1]
    assert all(shard.uneven for shard in shards)


def test_split_batches_wants_a_divisible_batch_size() -> None:
    with pytest.raises(ValueError, match="multiple of the 2 processes, but it is 3"):
        BatchSamplerShard(BatchSampler(range(9), 3, False), 2, 0, split_batches=True)


def test_what_clients_read_from_a_shard() -> None:
    inner = BatchSampler(SequentialSampler(range(10)), 2, False)
    shard = BatchSamplerShard(inner, 2, 1)
    assert (shard.batch_size, shard.drop_last, shard.num_processes, shard.process_index) == (2, False, 2, 1)
    assert shard.total_length == 5 and shard.sampler is inner.sampler and isinstance(shard, BatchSampler)


def test_seedable_sampler_orders_by_seed_plus_epoch() -> None:
    def order(seed: int) -> list[int]:
        # torch's own sampler, seeded by hand
        return list(RandomSampler(range(10), generator=torch.Generator().manual_seed(seed)))

    sampler = SeedableRandomSampler(range(10), data_seed=42)
    assert [list(sampler) for _ in range(3)] == [order(42), order(43), order(44)]
    sampler.set_epoch(1)
    assert list(sampler) == order(43)
    next(iter(sampler))  # broken off: the next iteration is another epoch all the same
    assert list(sampler) == order(45)
    torch.manual_seed(7)
    assert list(SeedableRandomSampler(range(10))) == order(7)


def test_seedable_sampler_names_the_epoch_that_is_being_read() -> None:
    sampler = SeedableRandomSampler(range(4), data_seed=1)
    sampler.set_epoch(3)
    assert [sampler.epoch for _ in sampler] == [3] * 4
    assert sampler.epoch == 4
    indices = iter(sampler)
    next(indices)
    sampler.set_epoch(7)
    del indices  # the iteration that is gone does not count on from what was chosen meanwhile
    assert sampler.epoch == 7


@pytest.mark.parametrize("prepared", [True, False])
def test_skipping_leaves_the_epoch_as_it_is(prepared: bool) -> None:
    loader: Any = DataLoader(range(8), batch_size=2, sampler=SeedableRandomSampler(range(8), data_seed=1))  # type: ignore[arg-type]
    if prepared:
        loader = prepare_data_loader(loader)
    sampler = loader.batch_sampler.sampler
    sampler.set_epoch(0)
    skipping = skip_first_batches(loader, 2)
    assert sampler.epoch == 0
    batches = iter(skipping)
    next(batches)
    assert sampler.epoch == 0
    assert len(list(batches)) == 1
    assert sampler.epoch == 1


def test_seedable_sampler_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    list(SeedableRandomSampler(range(10), data_seed=1))
    assert torch.equal(before, torch.get_rng_state())


def test_seedable_sampler_keeps_replacement_and_num_samples() -> None:
    sampler = SeedableRandomSampler(range(3), replacement=True, num_samples=20, data_seed=3)
    assert len(sampler) == 20 and len(list(sampler)) == 20 and set(sampler) <= {0, 1, 2}


def test_skip_batch_sampler() -> None:
    inner = BatchSampler(range(10), 3, False)
    for skip, expected in [(0, 4), (2, 2), (4, 0), (9, 0)]:
        skipping = SkipBatchSampler(inner, skip)
        assert list(skipping) == list(inner)[skip:] and len(skipping) == expected
    assert skipping.batch_size == 3 and skipping.total_length == 4
    twice = SkipBatchSampler(SkipBatchSampler(inner, 1), 1)
    assert list(twice) == list(inner)[2:]
    with pytest.raises(AttributeError):
        skipping.nothing_of_the_kind  # noqa: B018


def test_counts_are_those_of_the_batches_that_are_left() -> None:
    shard = BatchSamplerShard(GivenBatches([4, 3, 4, 1], 4), 2, 1, True, True)
    skipping = SkipBatchSampler(SkipBatchSampler(shard, 1), 1)
    assert list(skipping) == [[9, 10], [1, 2]]
    assert [skipping.counts(number) for number in range(2)] == [None, (0, 2)]


def test_get_sampler_looks_underneath() -> None:
    data: Any = range(8)
    loader: Any = DataLoader(data, batch_size=2)
    assert isinstance(get_sampler(loader), SequentialSampler)
    shard = SkipBatchSampler(BatchSamplerShard(loader.batch_sampler, 2, 0), 1)
    assert get_sampler(DataLoader(data, batch_sampler=shard)) is loader.sampler
    assert get_sampler(DataLoader(data, sampler=shard, batch_size=None)) is loader.sampler


def test_after_skipping_a_process_misses_only_what_others_still_have() -> None:
    # 5 batches over 2 processes: 3 and 2
    for skip, missed in [(0, [0, 1]), (1, [0, 1]), (2, [0, 1]), (3, [0, 0]), (9, [0, 0])]:
        inner = [BatchSamplerShard(BatchSampler(range(10), 2, False), 2, r, even_batches=False) for r in range(2)]
        shards = [SkipBatchSampler(shard, skip) for shard in inner]
        counts = [len(list(shard)) for shard in shards]
        assert counts == [max(3 - skip, 0), max(2 - skip, 0)] == [len(shard) for shard in shards]
        assert [shard.missed_steps for shard in shards] == missed, skip
        assert {shard.uneven for shard in shards} == {any(missed)}, skip


class AllRead(BatchSampler):
    """One that is asked for all batches of all processes, as it may be of any kind."""


def _samplers(length: int) -> list[Any]:
    data = range(length)
    return [
        SequentialSampler(data),
        RandomSampler(data, generator=torch.Generator().manual_seed(1)),
        RandomSampler(data, replacement=True, num_samples=length + 40, generator=torch.Generator().manual_seed(2)),
        RandomSampler(data, num_samples=2 * length + 3, generator=torch.Generator().manual_seed(3)),
        SeedableRandomSampler(data, data_seed=4),
        IndexedRandomSampler(data, data_seed=5),
    ]


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_leaving_out_what_others_read_changes_nothing(kind: int, drop_last: bool, even: bool) -> None:
    cases = [*itertools.product([1, 5, 8, 24, 53], [1, 3, 4], [1, 2, 5]), (9000, 8, 500), (20_000, 8, 500)]
    for length, size, processes in cases:
        for rank in {0, processes // 2, processes - 1}:
            seen = []
            for batching in (BatchSampler, AllRead):
                sampler = _samplers(length)[kind]
                shard = BatchSamplerShard(batching(sampler, size, drop_last), processes, rank, even_batches=even)
                for _ in range(2):
                    batches = list(shard)
                    counts = [shard.counts(number) for number in range(-1, len(batches))]
                    seen.append((batches, counts, shard.missed_steps, shard.uneven, getattr(sampler, "epoch", None)))
                next(iter(shard), None)  # broken off
                seen.append(getattr(sampler, "epoch", None))  # type: ignore[arg-type]
                generator = getattr(sampler, "generator", None)
                seen.append(None if generator is None else generator.get_state().tolist())
            assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_items_of_a_list_that_generators_hand_on_are_left_out() -> None:
    def handed_on(numbers: list[int]) -> Iterator[int]:
        yield from numbers
        yield -1

    iterator = handed_on(list(range(10)))
    assert next(iterator) == 0
    leave_out(iterator, 4)
    assert next(iterator) == 5
    leave_out(iterator, 4)
    assert list(iterator) == [-1]
    leave_out(iterator, 4)
    assert list(iterator) == []


def test_batches_of_something_that_is_no_loader_are_not_skipped() -> None:
    with pytest.raises(AttributeError, match="but was given a list: pass the loader itself"):
        skip_first_batches([1, 2, 3], 1)
