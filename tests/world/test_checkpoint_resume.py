"""A resumed run goes on with the samples, numbers and random draws of one that was never interrupted."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
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
from accelerate.errors import CheckpointError
from accelerate.state import PartialState
from accelerate.utils import GradientAccumulationPlugin, set_seed
from tests.harness import run_world
from tests.unit.accelerator.toys import Net, data, optimizer_values, weights
from tests.unit.data_loader.toys import Numbers

SAMPLES, BATCH, EPOCHS, BREAK = 22, 2, 3, 3


class Stream(IterableDataset):
    """Another order in each epoch, from the epoch alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.tolist())

    def __len__(self) -> int:
        return SAMPLES


class Own(Sampler[int]):
    """A sampler of somebody's own, with a generator under a name of its own."""

    def __init__(self) -> None:
        self.dice = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=self.dice).tolist()


class Around(Sampler[int]):
    """A sampler around another one, whose generator it does not have itself."""

    def __init__(self) -> None:
        self.inner = [RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(5))]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner[0])


class PlainBatches(Sampler[list[int]]):
    """Makes batches, and is no BatchSampler."""

    batch_size, drop_last = BATCH, False

    def __init__(self) -> None:
        self.around = Around()

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.around, BATCH, False))


class Drawn(IterableDataset):
    """Another order in each epoch, from a generator under a name of its own."""

    def __init__(self) -> None:
        self.dice = torch.Generator().manual_seed(8)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES, generator=self.dice).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Lists(Dataset):
    """Takes lists of indices."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def made(kind: str) -> tuple[Any, DataLoaderConfiguration]:
    config = DataLoaderConfiguration()
    numbers = Numbers(SAMPLES)
    options: dict[str, Any] = {}
    if kind == "seedable":
        config.use_seedable_sampler = True
        options["shuffle"] = True
    elif kind in ("shuffled", "workers", "dispatched"):
        options["shuffle"] = True
        options["num_workers"] = int(kind == "workers")
        config.dispatch_batches = True if kind == "dispatched" else None
    elif kind == "generator":
        options.update(shuffle=True, generator=torch.Generator().manual_seed(3))
    elif kind == "replacement":
        options["sampler"] = RandomSampler(numbers, replacement=True, num_samples=SAMPLES)
    elif kind == "subset":
        options["sampler"] = SubsetRandomSampler(range(SAMPLES))
    elif kind == "weighted":
        options["sampler"] = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    elif kind == "own":
        options["sampler"] = Own()
    elif kind == "persistent":
        options.update(shuffle=True, num_workers=1, persistent_workers=True)
    elif kind == "around":
        options["sampler"] = Around()
    elif kind == "plain batches":
        return DataLoader(numbers, batch_sampler=PlainBatches()), config
    elif kind == "lists":
        config.dispatch_batches = True
        return DataLoader(Lists(), None, sampler=BatchSampler(RandomSampler(range(SAMPLES)), BATCH, False)), config
    elif kind in ("iterable", "iterable shard", "drawn shard"):
        config.dispatch_batches = kind == "iterable"
        return DataLoader(Drawn() if kind == "drawn shard" else Stream(), BATCH), config
    return DataLoader(numbers, BATCH, **options), config


KINDS = [
    "plain",
    "shuffled",
    "seedable",
    "workers",
    "dispatched",
    "generator",
    "replacement",
    "subset",
    "weighted",
    "own",
    "persistent",
    "around",
    "plain batches",
    "lists",
    "iterable",
    "iterable shard",
    "drawn shard",
]


def prepared(kind: str, seed: int, exact: bool = False) -> tuple[Accelerator, Any]:
    torch.manual_seed(seed)
    loader, config = made(kind)
    config.exact_resume = exact
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator, accelerator.prepare(loader)


def whole(folder: str) -> dict[str, Any]:
    """Uninterrupted runs, saved on the way: inside the second epoch, at its last batch, and after it."""
    found = {}
    for kind in KINDS:
        accelerator, loader = prepared(kind, seed=accelerator_rank() + 1)
        epochs: list[list[Any]] = []
        for epoch in range(EPOCHS):
            epochs.append([])
            for number, batch in enumerate(loader):
                epochs[-1].append(batch.tolist())
                torch.rand(1)  # the training draws, too
                if epoch == 1 and number == BREAK - 1:
                    accelerator.save_state(os.path.join(folder, kind, "inside"))
                if epoch == 1 and number == len(loader) - 1:
                    accelerator.save_state(os.path.join(folder, kind, "last"))
            if epoch == 1:
                accelerator.save_state(os.path.join(folder, kind, "between"))
        found[kind] = (epochs, torch.rand(3).tolist())
    return found


def accelerator_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def read(loader: Any) -> list[Any]:
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        torch.rand(1)
    return batches


def resumed(folder: str) -> dict[Any, Any]:
    """The rest of those runs: the second epoch from where it was saved, and the third."""
    found: dict[Any, Any] = {}
    for kind in KINDS:
        for way in ("skip", "continue", "exact", "exact and skip", "last", "between", "exact last"):
            accelerator, loader = prepared(kind, seed=99, exact=way.startswith("exact"))
            place = way.removeprefix("exact ")
            accelerator.load_state(os.path.join(folder, kind, place if place in ("last", "between") else "inside"))
            epochs = []
            if way in ("skip", "exact and skip"):
                epochs.append(read(accelerator.skip_first_batches(loader, BREAK)))
            elif way == "continue":
                rest = []
                for number, batch in enumerate(loader):
                    if number < BREAK:
                        continue
                    rest.append(batch.tolist())
                    torch.rand(1)
                epochs.append(rest)
            elif way == "exact":
                epochs.append(read(loader))
            epochs.append(read(loader))
            found[kind, way] = (epochs, torch.rand(3).tolist())
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_the_order_is_that_of_the_uninterrupted_run(tmp_path: Path, processes: int) -> None:
    expected = run_world(whole, processes, str(tmp_path))
    found = run_world(resumed, processes, str(tmp_path))
    for rank in range(processes):
        for (kind, way), (epochs, draws) in found[rank].items():
            every, last_draws = expected[rank][kind]
            inside = [every[1][BREAK:], every[2]]
            wanted = [every[2]] if way.removeprefix("exact ") in ("last", "between") else inside
            assert epochs == wanted, (rank, kind, way)
            assert draws == last_draws, (rank, kind, way)
    for kind in KINDS:
        first, second = (expected[0][kind][0][epoch] for epoch in (1, 2))
        assert kind == "plain" or first != second  # the test would not notice a wrong epoch otherwise


class OwnBatches(BatchSampler):
    """Batches of somebody's own: neighbors, in an order that a generator draws."""

    def __init__(self, size: int | None) -> None:
        self.dice = torch.Generator().manual_seed(11)
        self.size = size or BATCH
        if size is not None:
            self.batch_size = size

    def __len__(self) -> int:
        return SAMPLES // self.size

    def __iter__(self) -> Iterator[list[int]]:
        for number in torch.randperm(len(self), generator=self.dice).tolist():
            yield list(range(number * self.size, (number + 1) * self.size))


class AtOnce(BatchSampler):
    """Makes all batches before it gives the first one out."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__()))


class Sorted(BatchSampler):
    """Makes each batch when it is asked for, though by no generator function of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        return map(sorted, super().__iter__())


ELASTIC = ["plain", "shuffled", "seedable", "generator", "subset", "own", "dispatched", "iterable", "iterable shard"]
ELASTIC += [
    "distributed",
    "own batches",
    "batches without a size",
    "around",
    "drawn shard",
    "lists",
    "at once",
    "sorted",
]
# Which of them have as many samples in a batch as they say themselves.
OF_ONE_SIZE = ("own batches", "batches without a size", "at once", "sorted")


def elastic(kind: str, batch_size: int, exact: bool) -> tuple[Accelerator, Any]:
    torch.manual_seed(99 if exact else accelerator_rank() + 1)
    if kind == "distributed":
        state = PartialState(cpu=True)
        numbers = Numbers(SAMPLES)
        sampler = DistributedSampler(numbers, state.num_processes, state.process_index, seed=4)
        loader, config = DataLoader(numbers, batch_size, sampler=sampler), DataLoaderConfiguration()
    elif kind in OF_ONE_SIZE:
        batches: Any = OwnBatches(BATCH if kind == "own batches" else None)
        if kind in ("at once", "sorted"):
            of_all = {"at once": AtOnce, "sorted": Sorted}[kind]
            batches = of_all(RandomSampler(range(SAMPLES)), BATCH, False)
        config = DataLoaderConfiguration(even_batches=kind != "batches without a size")
        loader = DataLoader(Numbers(SAMPLES), batch_sampler=batches)
    else:
        loader, config = made(kind)
        if batch_size != BATCH:
            if kind == "lists":
                options: dict[str, Any] = {"sampler": BatchSampler(RandomSampler(range(SAMPLES)), batch_size, False)}
            elif isinstance(loader.dataset, IterableDataset):
                options = {"batch_size": batch_size}
            else:
                options = {"batch_size": batch_size, "num_workers": 1, "sampler": loader.sampler}
            options = {"batch_size": None, "generator": loader.generator} | options
            loader = DataLoader(loader.dataset, **options)
    config.exact_resume = exact
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a DistributedSampler that is kept is said to be
        return accelerator, accelerator.prepare(loader)


def saved_inside(folder: str, steps: int) -> dict[str, list[Any]]:
    found = {}
    for kind in ELASTIC:
        accelerator, loader = elastic(kind, BATCH, exact=False)
        seen: list[int] = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if number == steps - 1:
                accelerator.save_state(os.path.join(folder, kind))
                break
        found[kind] = seen
    return found


def the_rest(folder: str, batch_size: int) -> dict[str, tuple[list[Any], list[Any], list[str], float]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    found = {}
    for kind in ELASTIC:
        accelerator, loader = elastic(kind, batch_size, exact=True)
        said.clear()
        accelerator.load_state(os.path.join(folder, kind))
        rest: list[int] = []
        for batch in loader:
            rest += batch.tolist()[: loader.gradient_state.active_dataloader.real_samples]
        following: list[int] = []
        for batch in loader:
            following += batch.tolist()[: loader.real_samples]
        found[kind] = (rest, following, list(said), torch.rand(1).item())
    return found


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_another_number_of_processes(tmp_path: Path, saved: int) -> None:
    """Every kind of loader, on 1 to 4 processes; and on as many, with another batch size and other workers."""
    steps = 2
    seen = run_world(saved_inside, saved, str(tmp_path), steps)
    for loaded in (1, 2, 3, 4):
        size = BATCH if loaded != saved else BATCH + 1
        found = run_world(the_rest, loaded, str(tmp_path), size)
        for kind in ELASTIC:
            done = [index for rank in seen for index in rank[kind]]
            assert len(set(done)) == steps * BATCH * saved
            rest = [index for rank in found for index in rank[kind][0]]
            assert sorted(done + rest) == list(range(SAMPLES)), (kind, loaded)
            assert sorted(index for rank in found for index in rank[kind][1]) == list(range(SAMPLES)), (kind, loaded)
            assert len({rank[kind][3] for rank in found}) == loaded  # no two ranks draw the same
            messages = [text for text in found[0][kind][2] if "a different number of processes or samples" in text]
            if kind in OF_ONE_SIZE and loaded == saved:
                assert messages == []  # nothing is different
                continue
            [message] = messages
            assert "may come" not in message
            if kind == "batches without a size":
                assert f"with {saved} batches per step became {loaded} with {loaded}" in message
                continue  # how many samples a step has is not known
            new, left = loaded * (BATCH if kind in OF_ONE_SIZE else size), SAMPLES - len(done)
            assert (
                f"{saved} process{'es' * (saved > 1)} with {saved * BATCH} samples per step became {loaded} with {new}"
                in message
            )
            now, then = -(-left // new), -(-left // (saved * BATCH))
            compared = "as before" if now == then else f"instead of {then}"
            assert f"so {now} steps are left of epoch 0 {compared}" in message


class OwnDistributed(DistributedSampler):
    def __iter__(self) -> Iterator[int]:
        return super().__iter__()


class ByPython(BatchSampler):
    """Shuffles with `random`, which is seeded alike on all processes."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(SAMPLES), SAMPLES)
        return iter([order[start : start + BATCH] for start in range(0, SAMPLES, BATCH)])


def by_python(folder: str, alike: bool, load: bool) -> tuple[list[list[int]], list[float]]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(exact_resume=True))
    set_seed(4, device_specific=not alike)
    loader = accelerator.prepare(DataLoader(Numbers(SAMPLES), batch_sampler=ByPython(range(SAMPLES), BATCH, False)))
    if load:
        accelerator.load_state(folder)
    epochs: list[list[int]] = []
    for epoch in range(2):
        epochs.append([])
        for number, batch in enumerate(loader):
            epochs[-1] += batch.tolist()[: loader.gradient_state.active_dataloader.real_samples]
            if not load and epoch == number == 0:
                accelerator.save_state(folder)
    return epochs, [random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("saved", [1, 2])
def test_new_processes_shuffle_with_python_as_the_others(tmp_path: Path, saved: int) -> None:
    run_world(by_python, saved, str(tmp_path), True, False)
    found = run_world(by_python, 3, str(tmp_path), True, True)
    assert sorted(index for epochs, _ in found for index in epochs[1]) == list(range(SAMPLES))
    assert len({draws[2] for _, draws in found}) == 4 - saved  # those of torch are their own


def test_new_processes_have_random_states_of_their_own_where_all_had(tmp_path: Path) -> None:
    run_world(by_python, 2, str(tmp_path), False, False)
    found = run_world(by_python, 4, str(tmp_path), False, True)
    for draws in zip(*(draws for _, draws in found), strict=True):
        assert len(set(draws)) == 4


def test_where_it_cannot_be_exact_it_says_so() -> None:
    from accelerate.data_loader.epoch import change

    def text(loader: Any, **options: Any) -> str:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
        prepared = accelerator.prepare(loader)
        saved = dataclasses.replace(prepared.position.snapshot(prepared), batch=4, processes=2, **options)
        return change(saved, prepared) or ""

    sampler = OwnDistributed(Numbers(SAMPLES), 1, 0)
    told = text(DataLoader(Numbers(SAMPLES), 2, sampler=sampler))
    assert "only its OwnDistributed knows which samples were seen: some may come twice or not at all" in told
    assert "its OwnBatches now makes different batches" in text(
        DataLoader(Numbers(SAMPLES), batch_sampler=OwnBatches(3))
    )
    told = text(DataLoader(Stream(), 2, num_workers=1))
    assert "worker processes read its dataset: the last samples before the checkpoint may come a second time" in told
    for exact in (
        DataLoader(Numbers(SAMPLES), 2),
        DataLoader(Numbers(SAMPLES), batch_sampler=OwnBatches(2)),
        DataLoader(Stream(), 2),
    ):
        told = text(exact)
        assert told and "may come" not in told


def again_and_again(folder: str, steps: int, saved: bool) -> tuple[list[int], list[int]]:
    accelerator, loader = prepared("shuffled", seed=1, exact=True)
    if saved:
        accelerator.load_state(folder)
    seen: list[int] = []
    for number, batch in enumerate(loader):
        real = loader.gradient_state.active_dataloader.real_samples
        seen += batch.tolist()[:real]
        if number == steps - 1:
            accelerator.save_state(folder)
            break
    return seen, seen


def test_the_number_may_change_more_than_once(tmp_path: Path) -> None:
    seen: list[int] = []
    for processes, steps in ((2, 2), (1, 2), (1, 1), (3, 1), (2, 99)):
        found = run_world(again_and_again, processes, str(tmp_path / "x"), steps, bool(seen))
        seen += [index for rank in found for index in rank[0]]
    assert sorted(seen) == list(range(SAMPLES))


def test_what_was_seen_is_not_fetched(tmp_path: Path) -> None:
    for exact in (True, False):
        numbers = Numbers(400_000)
        config = DataLoaderConfiguration(exact_resume=exact, use_seedable_sampler=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(numbers, 4, shuffle=True))
        if exact:
            iteration = loader.position.begin(loader)
            iteration.batches = 99_990
            accelerator.save_state(tmp_path)
            loader.position.end(iteration)
        accelerator.load_state(tmp_path)
        rest = read(accelerator.skip_first_batches(loader, 99_990) if not exact else loader)
        assert len(rest) == 10 and numbers.fetched == 40


class Telling(IterableDataset):
    """Can tell its place, and counts what it has read."""

    def __init__(self) -> None:
        self.place = self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < SAMPLES:
            self.place += 1
            self.read += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def telling(folder: str, dispatched: bool, load: bool) -> tuple[list[int], int]:
    config = DataLoaderConfiguration(exact_resume=True, dispatch_batches=dispatched)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    dataset = Telling()
    loader = accelerator.prepare(DataLoader(dataset, BATCH))
    if load:
        accelerator.load_state(folder)
    seen: list[int] = []
    for number, batch in enumerate(loader):
        seen += batch.tolist()[: loader.gradient_state.active_dataloader.real_samples]
        if number == 1 and not load:
            accelerator.save_state(folder)
            break
    return seen, dataset.read


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_dataset_that_can_tell_its_place(tmp_path: Path, dispatched: bool) -> None:
    for saved, loaded in ((1, 1), (2, 2), (2, 1), (1, 3)):
        folder = str(tmp_path / f"{saved}{loaded}")
        before = run_world(telling, saved, folder, dispatched, False)
        after = run_world(telling, loaded, folder, dispatched, True)
        rest = [index for rank in after for index in rank[0]]
        done = [index for rank in before for index in rank[0]]
        assert sorted(done + rest) == list(range(SAMPLES)), (saved, loaded)
        assert after[0][1] == SAMPLES - len(done)  # nothing of what was seen is read again


class Refusing(Telling):
    """Objects to a state halfway, if it is told to."""

    refuses = False

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
        if self.refuses:
            raise ValueError("these are other files")


class RefusingIndexed(Dataset):
    """The same, with indices: torchdata asks it for a state, too."""

    refuses, place = False, 0
    load_state_dict = Refusing.load_state_dict
    state_dict = Telling.state_dict

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def refused_by_the_dataset(folder: str, kind: Any, stateful: bool) -> tuple[str, list[int]]:
    """The error of a load that the last rank's dataset refuses, and what it sees of the next epoch after that."""
    config = DataLoaderConfiguration(
        exact_resume=not stateful, use_stateful_dataloader=stateful, dispatch_batches=False
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    dataset = kind()
    loader = accelerator.prepare(DataLoader(dataset, BATCH))
    for number, _ in enumerate(loader):
        if number == 1:
            accelerator.save_state(folder)
            break
    dataset.refuses, dataset.place = accelerator.is_last_process, 0
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    before = weights(model), optimizer_values(optimizer)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    assert torch.equal(weights(model), before[0])
    assert all(map(torch.equal, optimizer_values(optimizer), before[1]))
    assert dataset.place == 0
    seen = [index for batch in loader for index in batch.tolist()]
    dataset.refuses = False
    accelerator.load_state(folder)
    assert not torch.equal(weights(model), before[0])
    return str(caught.value), seen


@pytest.mark.parametrize(
    ("kind", "stateful", "processes"),
    [
        (Refusing, False, 1),
        (Refusing, False, 2),
        (Refusing, True, 1),
        (RefusingIndexed, True, 1),
        (RefusingIndexed, True, 2),
    ],
)
def test_a_dataset_that_refuses_its_state_leaves_all_as_it_was(
    tmp_path: Path, kind: Any, stateful: bool, processes: int
) -> None:
    if stateful:
        pytest.importorskip("torchdata.stateful_dataloader")
    outcomes = run_world(refused_by_the_dataset, processes, str(tmp_path), kind, stateful)
    assert len({text for text, _ in outcomes}) == 1
    text = outcomes[0][0]
    assert f"does not fit the {kind.__name__} that it is loaded into (ValueError: these are other files)" in text
    assert "loader 0" in text
    assert {index for _, seen in outcomes for index in seen} == set(range(SAMPLES))


class Cursor:
    """As long as what it reads, and with a state: not the data itself."""

    place = 0

    def __len__(self) -> int:
        return 2000

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class NoCopy(list[int]):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the data is shared")


class WithParts(Telling):
    """Keeps its place in an object of its own, beside much data."""

    def __init__(self) -> None:
        super().__init__()
        self.cursor, self.data = Cursor(), {"train": [NoCopy(range(2000))]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.cursor.load_state_dict(state)
        self.place = self.cursor.place


class WithAFile(Telling):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = open(path)  # noqa: SIM115

    def __iter__(self) -> Iterator[int]:
        self.file.seek(0)
        yield from super().__iter__()

    def __del__(self) -> None:
        self.file.close()


def test_a_refused_load_does_not_move_what_a_dataset_holds(tmp_path: Path) -> None:
    def run(kind: Any, outputs: int) -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(exact_resume=True))
        accelerator.prepare(torch.nn.Linear(2, outputs))
        return accelerator, accelerator.prepare(DataLoader(kind(), BATCH))

    path = tmp_path / "file"
    path.write_text("")
    for number, kind in enumerate((WithParts, partial(WithAFile, path))):
        accelerator, loader = run(kind, 1)
        for _ in loader:
            accelerator.save_state(tmp_path / str(number))
            break
        accelerator, loader = run(kind, 2)
        dataset = loader.dataset
        with pytest.raises(CheckpointError, match="other shapes"):
            accelerator.load_state(tmp_path / str(number))
        assert dataset.place == 0 and getattr(dataset, "cursor", Cursor).place == 0
        assert len(list(loader)) == -(-SAMPLES // BATCH)


class Placed(IterableDataset):
    """Has a place only when it is read, and counts its epochs."""

    epochs = 0

    def __iter__(self) -> Iterator[int]:
        for self.place in range(SAMPLES):
            yield 100 * self.epochs + self.place
        self.epochs += 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def next_epoch_of_placed(folder: str, dispatched: bool, load: bool) -> list[Any]:
    config = DataLoaderConfiguration(exact_resume=True, dispatch_batches=dispatched)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Placed(), BATCH))
    if load:
        accelerator.load_state(folder)
    else:
        read(loader)
        accelerator.save_state(folder)
    return [index for batch in read(loader) for index in batch]


@pytest.mark.parametrize("dispatched", [False, True])
def test_the_first_process_knows_the_dataset_between_two_epochs(tmp_path: Path, dispatched: bool) -> None:
    """Of a dispatched loader the others have not read theirs, and it need not be dispatched again."""
    expected = run_world(next_epoch_of_placed, 2, str(tmp_path), dispatched, False)
    for again in (False, True):
        found = run_world(next_epoch_of_placed, 2, str(tmp_path), again, True)
        assert sorted({index for rank in found for index in rank}) == sorted({i for rank in expected for i in rank})
        assert {index // 100 for rank in found for index in rank} == {1}


STATEFUL = ["plain", "seedable", "generator", "shuffled", "workers plain", "at once", "of torchdata"]


def stateful(kind: str, exact: bool) -> tuple[Accelerator, Any]:
    pytest.importorskip("torchdata.stateful_dataloader")
    loader, config = made(kind.removeprefix("workers "))
    config.use_stateful_dataloader, config.exact_resume, config.data_seed = True, exact, 3
    if kind == "workers plain":
        loader = DataLoader(Numbers(SAMPLES), BATCH, num_workers=1)
    elif kind == "at once":
        loader = DataLoader(Numbers(SAMPLES), batch_sampler=AtOnce(RandomSampler(range(SAMPLES)), BATCH, False))
    elif kind == "of torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Numbers(SAMPLES), BATCH, shuffle=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator, accelerator.prepare(loader)


def whole_stateful(folder: str) -> dict[str, Any]:
    found = {}
    for kind in STATEFUL:
        accelerator, loader = stateful(kind, False)
        found[kind] = [read(loader), read_saving(accelerator, loader, os.path.join(folder, kind)), read(loader)]
    return found


def read_saving(accelerator: Accelerator, loader: Any, folder: str) -> list[Any]:
    batches = []
    for number, batch in enumerate(loader):
        batches.append(batch.tolist())
        torch.rand(1)
        if number == BREAK - 1:
            accelerator.save_state(folder)
    return batches


def resumed_stateful(folder: str) -> dict[Any, Any]:
    found = {}
    for kind in STATEFUL:
        for exact in (False, True):
            accelerator, loader = stateful(kind, exact)
            accelerator.load_state(os.path.join(folder, kind))
            found[kind, exact] = [read(loader), read(loader)]
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_stateful_loaders_go_on_by_themselves(tmp_path: Path, processes: int) -> None:
    expected = run_world(whole_stateful, processes, str(tmp_path))
    found = run_world(resumed_stateful, processes, str(tmp_path))
    for rank in range(processes):
        for (kind, exact), epochs in found[rank].items():
            assert epochs == [expected[rank][kind][1][BREAK:], expected[rank][kind][2]], (rank, kind, exact)


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.dropout(x))


def trained(folder: str, precision: str, resume_at: int | None, save: bool) -> list[Any]:
    """Twelve micro-batches in each of two epochs, in windows of five; the state after each of them."""
    torch.manual_seed(accelerator_rank() + 1 if resume_at is None else 77)
    plugin = GradientAccumulationPlugin(num_steps=5)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(exact_resume=True),
    )
    net = Dropout()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    batches = DataLoader(data(24 * accelerator.num_processes), 2, shuffle=True)
    model, optimizer, scheduler, batches = accelerator.prepare(net, optimizer, scheduler, batches)
    step = 0
    if resume_at is not None:
        accelerator.load_state(os.path.join(folder, str(resume_at)))
        step = resume_at
    states = []
    while step < 24:
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += 1
            states.append(
                (loss.item(), weights(model).tolist(), optimizer_values(optimizer).tolist(), scheduler.get_last_lr())
            )
            if save:
                accelerator.save_state(os.path.join(folder, str(step)))
    return states


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("processes", [1, 2])
def test_bit_for_bit(tmp_path: Path, processes: int, precision: str) -> None:
    expected = run_world(trained, processes, str(tmp_path), precision, None, True)
    untouched = run_world(trained, processes, str(tmp_path), precision, None, False)
    assert expected == untouched  # saving changes nothing
    for place in (3, 5, 7, 12, 13, 22):
        assert run_world(trained, processes, str(tmp_path), precision, place, False) == [
            states[place:] for states in expected
        ], place


def counted_by_hand(folder: str, resume_at: int | None) -> list[Any]:
    """Windows of three micro-batches that only the script knows of."""
    torch.manual_seed(accelerator_rank() + 1 if resume_at is None else 77)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(exact_resume=True))
    net = Net()
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.05), DataLoader(data(8 * accelerator.num_processes), 1)
    )
    step = 0
    if resume_at is not None:
        for again in ("", " again"):  # saved, loaded, and saved once more
            accelerator.load_state(os.path.join(folder, f"{resume_at}{again}"))
            accelerator.save_state(os.path.join(folder, f"{resume_at} again"))
        step = resume_at
    states = []
    for x, y in batches:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        step += 1
        if step % 3 == 0:
            optimizer.step()
        if step % 3 == 0 and step != 6:
            optimizer.zero_grad()
        states.append(weights(model).tolist())
        if resume_at is None:
            accelerator.save_state(os.path.join(folder, str(step)))
        if step == 6:
            optimizer.zero_grad()
    return states


@pytest.mark.parametrize("processes", [1, 2])
def test_windows_counted_by_hand(tmp_path: Path, processes: int) -> None:
    expected = run_world(counted_by_hand, processes, str(tmp_path), None)
    for place in (1, 3, 5):
        found = run_world(counted_by_hand, processes, str(tmp_path), place)
        assert found == [states[place:] for states in expected], place
    # Gradients are written where they wait for a step, and not where the step was taken.
    written = [(tmp_path / str(step) / "gradients_0.safetensors").exists() for step in (1, 2, 3, 4, 5, 6)]
    assert written == [True, True, False, True, True, False]


class InOrder:
    """Batches of a class that torch does not know."""

    batch_size, drop_last = 4, False

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]])


def dispatched_by_own_batches(folder: str, saves: bool) -> list[int]:
    config = DataLoaderConfiguration(exact_resume=True, dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    batches: Any = InOrder()
    loader = accelerator.prepare(DataLoader(Numbers(11), batch_sampler=batches))
    if not saves:
        accelerator.load_state(folder)
    seen: list[int] = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
        if saves:
            accelerator.save_state(folder)
            break
    return seen


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1)])
def test_dispatched_batches_of_ones_own_go_on_with_another_number_of_processes(
    tmp_path: Path, saved: int, loaded: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    before = run_world(dispatched_by_own_batches, saved, folder, True)[0]
    after = run_world(dispatched_by_own_batches, loaded, folder, False)[0]
    assert before + after == list(range(11))


def some_steps(folder: str, resumes: bool) -> list[Any]:
    """The gradients of six steps; or of the last three of them, after a load."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(exact_resume=True))
    set_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    samples = torch.arange(96.0).reshape(48, 2) / 48
    parts: list[Any] = [net, torch.optim.AdamW(net.parameters(), lr=0.01), DataLoader(samples, 2, shuffle=True)]
    model, optimizer, loader = accelerator.prepare(*parts)
    assert all(parameter.grad is None for parameter in model.parameters())
    if resumes:
        accelerator.load_state(folder)
    seen: list[Any] = []
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        seen.append([parameter.grad.tolist() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == 3 and not resumes:
            accelerator.save_state(folder)
    if resumes:
        one_rank_watches_its_gradients(accelerator)
    return seen


def one_rank_watches_its_gradients(accelerator: Accelerator) -> None:
    """As trackers do on the main process: what is prepared then has to be done alike on all of them."""
    net = nn.Linear(1, 1, bias=False)
    if accelerator.is_main_process:
        net.weight.register_hook(lambda gradient: None)
    model = accelerator.prepare(net)
    for step in (1.0, 2.0):
        accelerator.backward(model(torch.full((1, 1), step * (accelerator.process_index + 1))).sum())
        assert net.weight.grad is not None and net.weight.grad.item() == step * 2.5  # the mean of 1 to 4
        net.weight.grad = None


def test_sums_of_several_ranks_are_rounded_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """DDP puts gradients together in another way from its second step on, where a resumed run has its first."""
    whole = run_world(some_steps, 4, str(tmp_path / "save"), False)
    rest = run_world(some_steps, 4, str(tmp_path / "save"), True)
    assert [steps[3:] for steps in whole] == rest


def schedule_of(folder: str, load: bool, size: int, split: bool) -> str:
    """What is said of the learning rate when a checkpoint is loaded."""
    config = DataLoaderConfiguration(split_batches=split, exact_resume=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=SAMPLES)
    loader = accelerator.prepare(net, optimizer, DataLoader(torch.zeros(24, 4), size), schedule)[2]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    try:
        if load:
            accelerator.load_state(folder)
            return " ".join(said)
        for _ in loader:
            accelerator.save_state(folder)
            break
        return ""
    finally:
        logging.getLogger("accelerate").removeHandler(handler)


def test_schedules_that_count_other_batches(tmp_path: Path) -> None:
    for split, sizes, told in [(False, (4, 8), True), (False, (4, 4), False), (True, (8, 8), False)]:
        folder = str(tmp_path / f"{split} {sizes}")
        run_world(schedule_of, 2, folder, False, sizes[0], split)
        (said,) = run_world(schedule_of, 1, folder, True, sizes[1], split)
        assert ("Prepared schedulers count batches, which have another size now" in said) == told, said
