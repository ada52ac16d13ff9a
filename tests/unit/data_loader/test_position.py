"""Places in loaders that are saved and loaded in less usual moments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
)

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.errors import CheckpointError
from tests.unit.data_loader.toys import Numbers

# torchdata calls something that torch has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SAMPLES, BREAK = 14, 3


def prepared(seed: int, *, exact: bool = True, size: int | None = 2, **options: Any) -> tuple[Accelerator, Any]:
    torch.manual_seed(seed)
    own = {name: options.pop(name) for name in ("num_workers", "shuffle", "generator") if name in options}
    config = DataLoaderConfiguration(exact_resume=exact, **options)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator, accelerator.prepare(DataLoader(Numbers(SAMPLES), size, **({"shuffle": True} | own)))


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def epochs(accelerator: Accelerator, loader: Any, folder: Path, at: int = BREAK) -> list[Any]:
    """Three epochs; saved inside the second one."""
    found: list[Any] = []
    for epoch in range(3):
        found.append([])
        for number, batch in enumerate(loader):
            found[-1].append(batch.tolist())
            if epoch == 1 and number == at - 1:
                accelerator.save_state(folder)
    return found


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_saved_again_before_anything_is_read(tmp_path: Path, seedable: bool, stateful: bool) -> None:
    options = {"use_seedable_sampler": seedable, "use_stateful_dataloader": stateful, "data_seed": 3}
    expected = epochs(*prepared(1, **options), tmp_path / "0")
    for again in range(2):
        accelerator, loader = prepared(2, **options)
        accelerator.load_state(tmp_path / str(again))
        accelerator.save_state(tmp_path / str(again + 1))
    accelerator, loader = prepared(3, **options)
    accelerator.load_state(tmp_path / "2")
    assert [read(loader), read(loader)] == [expected[1][BREAK:], expected[2]]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seedable", [False, True])
def test_loaded_inside_a_loop(tmp_path: Path, exact: bool, seedable: bool) -> None:
    """The end of that loop is not the end of an epoch of the checkpoint."""
    accelerator, loader = prepared(1, exact=exact, use_seedable_sampler=seedable)
    expected = epochs(accelerator, loader, tmp_path)
    for _ in range(2):
        for _ in loader:
            accelerator.load_state(tmp_path)
            break
        rest = accelerator.skip_first_batches(loader, BREAK)
        for _ in rest:  # nor is that of the rest of one
            accelerator.load_state(tmp_path)
            break
    rest = accelerator.skip_first_batches(loader, BREAK)
    assert [read(rest), read(loader)] == [expected[1][BREAK:], expected[2]]


@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": True}, {"use_stateful_dataloader": True}])
@pytest.mark.parametrize("exact", [False, True])
def test_a_script_that_skips_all_of_an_epoch(tmp_path: Path, exact: bool, options: dict[str, Any]) -> None:
    accelerator, loader = prepared(1, exact=exact, **options)
    expected = epochs(accelerator, loader, tmp_path, at=len(loader))
    accelerator, loader = prepared(2, exact=exact, **options)
    accelerator.load_state(tmp_path)
    rest = accelerator.skip_first_batches(loader, len(loader))
    assert [read(rest), read(loader)] == [[], expected[2]]


def test_a_script_counts_all_its_steps(tmp_path: Path) -> None:
    """Those of a run with another batch size, too; nothing is skipped twice, and nothing left out."""
    seen: list[int] = []
    steps = 0
    for number, size in enumerate((2, 3, 1)):
        accelerator, loader = prepared(number, size=size)
        if number:
            accelerator.load_state(tmp_path)
            loader = accelerator.skip_first_batches(loader, steps)
        for batch in loader:
            seen += batch.tolist()
            steps += 1
            if number < 2 and steps == 2 * (number + 1):
                accelerator.save_state(tmp_path)
                break
    assert sorted(seen) == list(range(SAMPLES)) and steps == 2 + 2 + 4


def test_batches_of_one_without_a_batch_size(tmp_path: Path) -> None:
    accelerator, loader = prepared(1, size=None)
    seen = []
    for number, sample in enumerate(loader):
        seen.append(int(sample))
        if number == 5:
            accelerator.save_state(tmp_path)
    for exact in (False, True):
        accelerator, loader = prepared(2, size=None, exact=exact)
        accelerator.load_state(tmp_path)
        rest = loader if exact else accelerator.skip_first_batches(loader, 6)
        assert [int(sample) for sample in rest] == seen[6:]
        assert loader.dataset.fetched == SAMPLES - 6  # and nothing of what was seen


def test_a_loader_that_is_read_inside_its_own_loop(tmp_path: Path) -> None:
    accelerator, loader = prepared(1, use_seedable_sampler=True)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        if number == 1:
            assert len(read(loader)) == len(loader)
        if number == BREAK - 1:
            accelerator.save_state(tmp_path)
    accelerator, loader = prepared(1, use_seedable_sampler=True)
    accelerator.load_state(tmp_path)
    assert read(loader) == seen[BREAK:]


@pytest.mark.parametrize("exact", [False, True])
def test_a_generator_of_two_loaders(tmp_path: Path, exact: bool) -> None:
    """torch's loader draws from its generator for each iteration, also where it does not shuffle."""

    def two(seed: int) -> tuple[Accelerator, Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        accelerator, loader = prepared(seed, exact=exact, generator=generator)
        return accelerator, loader, accelerator.prepare(DataLoader(Numbers(4), 2, generator=generator))

    accelerator, loader, other = two(1)
    expected: list[Any] = []
    for epoch in range(3):
        expected.append([])
        for number, batch in enumerate(loader):
            expected[-1].append(batch.tolist())
            if number == 1:
                read(other)
            if epoch == 1 and number == BREAK - 1:
                accelerator.save_state(tmp_path)
    accelerator, loader, other = two(2)
    accelerator.load_state(tmp_path)
    rest = loader if exact else accelerator.skip_first_batches(loader, BREAK)
    assert [read(rest), read(loader)] == [expected[1][BREAK:], expected[2]]


@pytest.mark.parametrize("workers", [(0, 0), (0, 1), (1, 0), (1, 2)])
@pytest.mark.parametrize("exact", [False, True])
def test_a_stateful_loader_with_other_workers_and_batches(
    tmp_path: Path, workers: tuple[int, int], exact: bool
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    seen: list[int] = []
    for number, size in enumerate((2, 2, 3)):
        accelerator, loader = prepared(
            number, exact=exact, size=size, use_stateful_dataloader=True, num_workers=workers[number > 0]
        )
        if number:
            accelerator.load_state(tmp_path)
        for step, batch in enumerate(loader):
            seen += batch.tolist()
            if number < 2 and step == 1:
                accelerator.save_state(tmp_path)
                break
    assert sorted(seen) == list(range(SAMPLES))
    assert sorted(index for batch in loader for index in batch.tolist()) == list(range(SAMPLES))


def test_a_stateful_loader_and_a_script_that_skips(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    expected = epochs(*prepared(1, use_stateful_dataloader=True), tmp_path)
    accelerator, loader = prepared(2, use_stateful_dataloader=True)
    accelerator.load_state(tmp_path)
    rest = accelerator.skip_first_batches(loader, BREAK)
    assert [read(rest), read(loader)] == [expected[1][BREAK:], expected[2]]


@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": True}, {"use_stateful_dataloader": True}])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("error", [False, True])
def test_saved_after_a_loop_that_was_left(tmp_path: Path, exact: bool, error: bool, options: dict[str, Any]) -> None:
    """The script comes back to the epoch by skipping what it had done; without that the next one follows."""

    def leave(loader: Any) -> None:
        for number, _ in enumerate(loader):
            if number == BREAK - 1 and error:
                raise KeyboardInterrupt
            if number == BREAK - 1:
                break

    accelerator, loader = prepared(1, exact=exact, **options)
    expected = [read(loader), read(loader)]
    accelerator, loader = prepared(1, exact=exact, **options)
    read(loader)
    try:
        leave(loader)
    except KeyboardInterrupt:
        assert error
    accelerator.save_state(tmp_path / "0")
    following = read(loader)
    for number in range(2):  # it is known again after a load
        accelerator, loader = prepared(2, exact=exact, **options)
        accelerator.load_state(tmp_path / str(number))
        accelerator.save_state(tmp_path / str(number + 1))
        assert read(accelerator.skip_first_batches(loader, BREAK)) == expected[1][BREAK:]
    accelerator, loader = prepared(2, exact=exact, **options)
    accelerator.load_state(tmp_path / "0")
    assert read(loader) == following


class AtOnce(BatchSampler):
    """Makes all batches before it gives the first one out."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__()))


@pytest.mark.parametrize("way", ["exact", "skip", "continue"])
def test_a_batch_sampler_that_makes_all_batches_at_once(tmp_path: Path, way: str) -> None:
    """It draws its order before torch's loader draws a number, not after."""

    def made(seed: int) -> tuple[Accelerator, Any]:
        torch.manual_seed(seed)
        config = DataLoaderConfiguration(exact_resume=way == "exact")
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        sampler = AtOnce(RandomSampler(range(SAMPLES)), 2, False)
        return accelerator, accelerator.prepare(DataLoader(Numbers(SAMPLES), batch_sampler=sampler))

    expected = epochs(*made(1), tmp_path)
    accelerator, loader = made(2)
    accelerator.load_state(tmp_path)
    rest = read(accelerator.skip_first_batches(loader, BREAK) if way == "skip" else loader)
    assert [rest[BREAK * (way == "continue") :], read(loader)] == [expected[1][BREAK:], expected[2]]


class Standing(IterableDataset):
    """Counts its epochs, and gives out numbers of them, from where it stands."""

    def __init__(self) -> None:
        self.place = self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < SAMPLES:
            self.place += 1
            yield 100 * self.epochs + self.place
        self.place, self.epochs = 0, self.epochs + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.epochs = state["place"], state["epochs"]


class GoingOn(Standing):
    """Takes the place that it is told for the one to start at, once."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for self.place in range(start + 1, SAMPLES + 1):
            yield self.place

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class Insisting(GoingOn):
    """Goes to the place that it was told of at each iteration, until it is told of another."""

    def __iter__(self) -> Iterator[int]:
        start = self.start
        for self.place in range(start + 1, SAMPLES + 1):
            yield self.place


class Refusing(GoingOn):
    """Has no place behind its last sample, and none before it is read."""

    def __init__(self) -> None:
        self.start = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        list(range(SAMPLES))[state["place"]]
        super().load_state_dict(state)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}


class Counting(Numbers):
    """A state of its own, and samples that depend on it."""

    def __getitem__(self, index: int) -> int:
        return 100 * super().__getitem__(index) + self.fetched

    def state_dict(self) -> dict[str, int]:
        return {"fetched": self.fetched}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.fetched = state["fetched"]


# Of the last one only a stateful loader keeps the state.
@pytest.mark.parametrize(
    ("kind", "stateful"),
    [(kind, stateful) for kind in (Standing, GoingOn, Insisting, Refusing) for stateful in (False, True)]
    + [(Counting, True)],
)
@pytest.mark.parametrize("inside", [True, False])
def test_datasets_with_a_state_at_the_end_of_an_epoch(tmp_path: Path, kind: Any, inside: bool, stateful: bool) -> None:
    if stateful:
        pytest.importorskip("torchdata.stateful_dataloader")

    def made(seed: int) -> tuple[Accelerator, Any]:
        torch.manual_seed(seed)
        config = DataLoaderConfiguration(exact_resume=not stateful, use_stateful_dataloader=stateful)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        dataset = kind(SAMPLES) if kind is Counting else kind()
        return accelerator, accelerator.prepare(DataLoader(dataset, 2, shuffle=kind is Counting))

    accelerator, loader = made(1)
    if kind is not Refusing or not stateful:  # which torchdata asks at once
        accelerator.save_state(tmp_path)
    for number, _ in enumerate(loader):
        if inside and number == SAMPLES // 2 - 1:
            accelerator.save_state(tmp_path)
    if not inside:
        accelerator.save_state(tmp_path)
    expected = [read(loader), read(loader)]
    accelerator, loader = made(2)
    accelerator.load_state(tmp_path)
    assert [read(loader), read(loader)] == expected


@pytest.mark.parametrize("kind", [Standing, GoingOn, Insisting])
@pytest.mark.parametrize("stateful", [False, True])
def test_datasets_with_a_state_in_a_loop_that_was_left(tmp_path: Path, kind: Any, stateful: bool) -> None:
    def made() -> tuple[Accelerator, Any]:
        config = DataLoaderConfiguration(exact_resume=not stateful, use_stateful_dataloader=stateful)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return accelerator, accelerator.prepare(DataLoader(kind(), 2))

    whole = read(made()[1])
    accelerator, loader = made()
    for number, _ in enumerate(loader):
        if number == BREAK - 1:
            break
    accelerator.save_state(tmp_path)
    accelerator, loader = made()
    accelerator.load_state(tmp_path)
    assert read(accelerator.skip_first_batches(loader, BREAK)) == whole[BREAK:]
    accelerator, loader = made()
    accelerator.load_state(tmp_path)
    assert read(loader) == whole


def test_a_refused_load_leaves_a_stateful_loader_alone(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    class Refuses(torch.nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("too old")

    accelerator, loader = prepared(1, shuffle=False, use_stateful_dataloader=True)
    accelerator.prepare(Refuses(2, 2))
    for number, _ in enumerate(loader):
        if number == BREAK - 1:
            accelerator.save_state(tmp_path)
    with pytest.raises(RuntimeError, match="too old"):
        accelerator.load_state(tmp_path)
    assert len(read(loader)) == SAMPLES // 2


class Holding(Standing):
    """Its state holds an object that nothing in a file may make."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "by": Path("."), "made": Numbers(1)}


@pytest.mark.parametrize("inside", [True, False])
def test_a_state_that_would_be_refused_is_not_saved(
    tmp_path: Path, inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(exact_resume=True))
        return accelerator, accelerator.prepare(DataLoader(Holding(), 2))

    accelerator, loader = made()
    whole = []
    for number, batch in enumerate(loader):
        whole.append(batch.tolist())
        if inside and number == BREAK - 1:
            accelerator.save_state(tmp_path)
    if not inside:
        accelerator.save_state(tmp_path)
    accelerator.save_state(tmp_path / "again")
    assert len([text for text in caplog.messages if "Holding of loader 0 contains" in text and "Numbers" in text]) == 1
    accelerator, loader = made()
    accelerator.load_state(tmp_path)
    assert read(loader) == (whole[BREAK:] if inside else whole)


class InATensor(Standing):
    def state_dict(self) -> Any:
        return torch.tensor([self.place, self.epochs])

    def load_state_dict(self, state: Any) -> None:
        self.place, self.epochs = state.tolist()


def test_a_state_that_is_a_tensor(tmp_path: Path) -> None:
    def made() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(exact_resume=True))
        return accelerator, accelerator.prepare(DataLoader(InATensor(), 2))

    accelerator, loader = made()
    read(loader)
    accelerator.save_state(tmp_path)
    expected = read(loader)
    accelerator, loader = made()
    accelerator.load_state(tmp_path)
    assert read(loader) == expected


class Endless(Sampler[int]):
    """Has no length."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(5)
        while True:
            yield from torch.randperm(SAMPLES, generator=generator).tolist()


def of(sampler: Any, size: int | None = 2, **options: Any) -> tuple[Accelerator, Any]:
    config = DataLoaderConfiguration(**({"exact_resume": True} | options))
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    key = "batch_sampler" if isinstance(sampler, BatchSampler) else "sampler"
    own = {key: sampler} | ({} if key == "batch_sampler" else {"batch_size": size})
    return accelerator, accelerator.prepare(DataLoader(torch.arange(SAMPLES), **own))


def test_a_sampler_without_an_end_and_other_batches(tmp_path: Path) -> None:
    order = Endless()
    accelerator, loader = of(order)
    for number, _ in enumerate(loader):
        if number == BREAK - 1:
            accelerator.save_state(tmp_path)
            break
    accelerator, loader = of(order, size=3)
    accelerator.load_state(tmp_path)
    expected = iter(order)
    assert [next(expected) for _ in range(2 * BREAK)]
    for batch, _ in zip(loader, range(8), strict=False):
        assert batch.tolist() == [next(expected) for _ in range(3)]


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (lambda: SubsetRandomSampler(range(10)), "so 4 steps are left of epoch 0 instead of 2"),
        (lambda: RandomSampler(range(SAMPLES), num_samples=40), "so 34 steps are left of epoch 0 instead of 17"),
        (lambda: BatchSampler(range(9), 2, True), None),
        (Endless, "became 1 with 1."),
    ],
)
def test_steps_left_are_those_of_the_sampler(
    tmp_path: Path, sampler: Any, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, loader = of(sampler())
    for number, _ in enumerate(loader):
        if number == BREAK - 1:
            accelerator.save_state(tmp_path)
            break
    other = sampler() if said else BatchSampler(range(9), 4, True)
    accelerator, loader = of(other, size=1)
    accelerator.load_state(tmp_path)
    # Where the last samples do not fill a batch, they are dropped.
    assert (said or "so 0 steps are left of epoch 0 instead of 1") in caplog.text


@pytest.mark.parametrize("exact", [True, False])
def test_it_is_said_where_an_epoch_starts_again(tmp_path: Path, exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, loader = of(range(8), exact_resume=exact)
    for _ in loader:
        accelerator.save_state(tmp_path)
        break
    accelerator, loader = of(range(8), size=1, exact_resume=exact)
    accelerator.load_state(tmp_path)
    assert "so 6 steps are left of epoch 0 instead of 3" in caplog.text
    assert (
        "Without `exact_resume`, loaders start this epoch again: leave out what was seen" in caplog.text
    ) is not exact
    assert len(list(loader)) == (6 if exact else 8)


def test_another_kind_of_shuffle_is_refused_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def shuffled(shuffle: str | None) -> tuple[Accelerator, Any]:
        config = DataLoaderConfiguration(shuffle=shuffle, exact_resume=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return accelerator, accelerator.prepare(DataLoader(torch.arange(SAMPLES), batch_size=2, shuffle=True))

    accelerator, loader = shuffled("indexed")
    for number, _ in enumerate(loader):
        if number == BREAK:
            accelerator.save_state(tmp_path / "middle")
    accelerator.save_state(tmp_path / "end")
    accelerator, _ = shuffled(None)
    accelerator.load_state(tmp_path / "end")
    with pytest.raises(
        CheckpointError, match="loader 0, in the order of its IndexedRandomSampler, but on rank 0 its order now comes"
    ):
        accelerator.load_state(tmp_path / "middle")
    shuffled("indexed")[0].load_state(tmp_path / "middle")
    # Where nothing is skipped, as in a script that only evaluates, the order does not matter.
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(SAMPLES), batch_size=4))
    accelerator.load_state(tmp_path / "middle")
    assert torch.cat(list(loader)).tolist() == list(range(SAMPLES))


def test_as_many_steps_left_as_before_are_said_to_be_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, loader = of(range(4))
    for _ in loader:
        accelerator.save_state(tmp_path)
        break
    accelerator, loader = of(range(4), size=3)
    accelerator.load_state(tmp_path)
    assert "so 1 steps are left of epoch 0 as before" in caplog.text


class Buffer(IterableDataset):
    """Shuffles within a window, by draws that it makes batch by batch."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        window: list[int] = []
        for index in range(SAMPLES):
            window.append(index)
            if len(window) == 5:
                yield window.pop(self.draw(5))
        while window:
            yield window.pop(self.draw(len(window)))


class Drawn(Sampler[int]):
    """An order that is drawn index by index."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(self.draw(len(left)))


@pytest.mark.parametrize("draw", [random.randrange, np.random.randint])
@pytest.mark.parametrize("kind", ["buffer", "buffer, dispatched", "sampler", "sampler and a worker"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_an_order_that_is_drawn_batch_by_batch(tmp_path: Path, draw: Any, kind: str, skipped: int) -> None:
    """The loop leaves out what was done, or part of it, by itself."""

    def made(seed: int) -> tuple[Accelerator, Any]:
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(seed)
        dispatched = {"dispatch_batches": True if "dispatched" in kind else None}
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**dispatched))
        if "buffer" in kind:
            return accelerator, accelerator.prepare(DataLoader(Buffer(draw), 2))
        workers = int("worker" in kind)
        loader = DataLoader(Numbers(SAMPLES), 2, sampler=Drawn(draw), num_workers=workers)
        return accelerator, accelerator.prepare(loader)

    expected = epochs(*made(1), tmp_path)
    accelerator, loader = made(2)
    accelerator.load_state(tmp_path)
    rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
    seen = []
    for number, batch in enumerate(rest, start=skipped):
        torch.rand(1)  # the training draws, too
        if number >= BREAK:
            seen.append(batch.tolist())
    assert [seen, read(loader)] == [expected[1][BREAK:], expected[2]]


class Eager(Sampler[int]):
    """Draws its order when it is told to iterate."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            return iter(random.sample(range(SAMPLES), SAMPLES))
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


class EagerBatches(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__()))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("python", [False, True])
def test_a_stateful_loader_whose_order_is_drawn_at_once(tmp_path: Path, exact: bool, size: Any, python: bool) -> None:
    """torchdata tells it to iterate twice when it goes on from a state."""
    pytest.importorskip("torchdata.stateful_dataloader")

    def made(seed: int) -> tuple[Accelerator, Any]:
        random.seed(seed)
        sampler = Eager(None if python else torch.Generator().manual_seed(seed))
        batches = sampler if size is None else EagerBatches(sampler, size, False)
        return of(batches, size, exact_resume=exact, use_stateful_dataloader=True)

    expected = epochs(*made(1), tmp_path)
    accelerator, loader = made(2)
    accelerator.load_state(tmp_path)
    assert [read(loader), read(loader)] == [expected[1][BREAK:], expected[2]]


class ToldTheEpoch(Eager):
    """Has no order before it is told the epoch."""

    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.epoch is None:
            raise RuntimeError("which epoch?")
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def test_a_stateful_loader_that_cannot_be_iterated_when_it_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    def made() -> tuple[Accelerator, Any]:
        return of(EagerBatches(ToldTheEpoch(None), 2, False), use_stateful_dataloader=True)

    expected = epochs(*made(), tmp_path)
    accelerator, loader = made()
    accelerator.load_state(tmp_path)
    assert [read(loader), read(loader)] == [expected[1][BREAK:], expected[2]]


@pytest.mark.parametrize(("stateful", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_a_loader_of_torchdata_with_other_batches(tmp_path: Path, stateful: bool, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    seen: list[int] = []
    for size in (2, 3):
        config = DataLoaderConfiguration(exact_resume=True, use_stateful_dataloader=stateful)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        options = {"shuffle": True, "num_workers": workers}
        loader = accelerator.prepare(torchdata.StatefulDataLoader(Numbers(SAMPLES), size, **options))
        if seen:
            accelerator.load_state(tmp_path)
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if size == 2 and number == 1:
                accelerator.save_state(tmp_path)
                break
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize("late", [False, True])
def test_places_of_more_loaders_than_there_are(tmp_path: Path, late: bool, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, first = prepared(1)
    read(first)
    second = accelerator.prepare(DataLoader(Numbers(SAMPLES), 2))
    accelerator.save_state(tmp_path / "between")
    for _ in second:
        accelerator.save_state(tmp_path / "inside")
        break
    for folder in ("between", "inside"):
        accelerator = Accelerator(cpu=True) if late else prepared(2)[0]
        caplog.clear()
        accelerator.load_state(tmp_path / folder)
        told = [text for text in caplog.messages if "the positions of 2 data loaders" in text]
        assert len(told) == (folder == "inside")  # between two epochs nothing is lost
        assert all(f"{int(not late)} prepared" in text and "loader 1" in text for text in told)
    accelerator, _ = prepared(2)
    accelerator.prepare(DataLoader(Numbers(SAMPLES)), DataLoader(Numbers(SAMPLES)))
    caplog.clear()
    accelerator.load_state(tmp_path / "inside")
    assert "the positions of" not in caplog.text  # all of them were taken
