"""A resumed run goes on with what its dataset draws at random, be it in this process or in workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from tests.harness import run_world

SAMPLES, BATCH, EPOCHS = 24, 2, 3


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Noisy(Dataset):
    """The index of a sample, and numbers from all three global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *draws()], dtype=torch.float64)


class NoisyLists(Noisy):
    def __getitem__(self, indices: Any) -> torch.Tensor:
        return torch.stack([super(NoisyLists, self).__getitem__(index) for index in indices])


class NoisyStream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for index in range(info.id if info else 0, SAMPLES, info.num_workers if info else 1):
            yield torch.tensor([index, *draws()], dtype=torch.float64)


class Telling(NoisyStream):
    """Can be sent to its place."""

    place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < SAMPLES:
            self.place += 1
            yield torch.tensor([self.place, *draws()], dtype=torch.float64)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Plain(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def noisy_collate(samples: list[int]) -> torch.Tensor:
    return torch.stack([torch.tensor([sample, *draws()], dtype=torch.float64) for sample in samples])


def seeded_by_itself(worker: int) -> None:
    random.seed(1000 + worker)
    np.random.seed(2000 + worker)


KINDS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "here": (Noisy, {"shuffle": True}, {}),
    "here, in order": (Noisy, {}, {}),
    "here, by its collate function": (Plain, {"shuffle": True, "collate_fn": noisy_collate}, {}),
    "here, in lists": (NoisyLists, {"shuffle": True, "batch_size": None}, {}),
    "here, seedable": (Noisy, {"shuffle": True}, {"use_seedable_sampler": True}),
    "here, dispatched": (Noisy, {"shuffle": True}, {"dispatch_batches": True}),
    "here, stateful": (Noisy, {"shuffle": True}, {"use_stateful_dataloader": True}),
    "here, a stream": (NoisyStream, {}, {}),
    "here, a stream, dispatched": (NoisyStream, {}, {"dispatch_batches": True}),
    "here, a stream that tells its place": (Telling, {}, {}),
    "one worker": (Noisy, {"shuffle": True, "num_workers": 1}, {}),
    "three workers": (Noisy, {"shuffle": True, "num_workers": 3}, {}),
    "workers with an own start": (Noisy, {"shuffle": True, "num_workers": 2, "worker_init_fn": seeded_by_itself}, {}),
    "workers, by their collate function": (Plain, {"num_workers": 2, "collate_fn": noisy_collate}, {}),
    "workers that stay": (Noisy, {"shuffle": True, "num_workers": 2, "persistent_workers": True}, {}),
    "workers, dispatched": (Noisy, {"shuffle": True, "num_workers": 3}, {"dispatch_batches": True}),
    "workers, a stream": (NoisyStream, {"num_workers": 2}, {"dispatch_batches": False}),
}


def prepared(kind: str, exact: bool) -> tuple[Accelerator, Any]:
    dataset, options, config = KINDS[kind]
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(exact_resume=exact, **config))
    set_seed(3, device_specific=True)
    if options.get("batch_size", BATCH) is None:
        options = {"batch_size": None, "sampler": BatchSampler(RandomSampler(range(SAMPLES)), BATCH, False)}
    return accelerator, accelerator.prepare(DataLoader(dataset(), **{"batch_size": BATCH, **options}))


def trained(kind: str, folder: str, start: int, saves: list[int], exact: bool = True) -> list[Any]:
    """What the loop sees from step `start` on, where there is a checkpoint. saves: after which steps to make some."""
    accelerator, loader = prepared(kind, exact)
    seen: list[Any] = []
    rest = None
    if start:
        accelerator.load_state(f"{folder}/{start}")
        if not exact and (done := start % (SAMPLES // BATCH // accelerator.num_processes)):
            rest = accelerator.skip_first_batches(loader, done)
    for _ in range(loader.iteration, EPOCHS):
        for batch in loader if rest is None else rest:
            seen.append([batch.tolist(), draws()])
            if start + len(seen) in saves:
                accelerator.save_state(f"{folder}/{start + len(seen)}")
        rest = None
    seen.append(draws())
    accelerator.end_training()
    return seen


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_the_dataset_draws_is_what_it_would_have_drawn(kind: str, processes: int, tmp_path: Path) -> None:
    steps = SAMPLES // BATCH // processes
    saves = [1, steps - 1, steps + 1, 2 * steps - 2]
    whole = run_world(trained, processes, kind, str(tmp_path), 0, saves)
    for start in saves[:1] + saves[2:]:
        # The last one is overwritten by a run that was resumed itself.
        resumed = run_world(trained, processes, kind, str(tmp_path), start, saves[3:])
        for rank in range(processes):
            assert resumed[rank] == whole[rank][start:], (start, rank)


@pytest.mark.parametrize("kind", ["here", "workers that stay", "workers, dispatched", "here, a stream"])
def test_a_script_that_skips_by_itself(kind: str, tmp_path: Path) -> None:
    whole = run_world(trained, 2, kind, str(tmp_path), 0, [8], False)
    resumed = run_world(trained, 2, kind, str(tmp_path), 8, [], False)
    assert resumed == [seen[8:] for seen in whole]


def left_out_by_hand(kind: str, folder: str, done: int) -> list[Any]:
    accelerator, loader = prepared(kind, exact=False)
    accelerator.load_state(folder)
    seen = []
    for number, batch in enumerate(loader):
        if number >= done:
            seen.append([batch.tolist(), draws()])
    return seen


@pytest.mark.parametrize("kind", ["here", "here, a stream", "here, dispatched", "three workers", "workers that stay"])
def test_a_script_that_leaves_batches_out_by_itself(kind: str, tmp_path: Path) -> None:
    """What the dataset draws for those is not drawn from the random states that were loaded."""
    steps = SAMPLES // BATCH // 2
    whole = run_world(trained, 2, kind, str(tmp_path), 0, [steps + 3], False)
    resumed = run_world(left_out_by_hand, 2, kind, str(tmp_path / str(steps + 3)), 3)
    assert resumed == [seen[steps + 3 : 2 * steps] for seen in whole]


class NoisyLater(Noisy):
    """Draws from the middle of the epoch on."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) if index >= SAMPLES // 2 else torch.tensor([index] * 4, dtype=torch.float64)


KINDS |= {
    "here, later": (NoisyLater, {"batch_size": 1}, {}),
    "workers, later": (NoisyLater, {"batch_size": 1, "num_workers": 2}, {}),
}


@pytest.mark.parametrize("kind", ["here, later", "workers, later"])
def test_a_dataset_that_draws_later_is_noticed(kind: str, tmp_path: Path) -> None:
    whole = run_world(trained, 1, kind, str(tmp_path), 0, [18])
    resumed = run_world(trained, 1, kind, str(tmp_path), 18, [])
    assert resumed == [seen[18:] for seen in whole]


def with_other_workers(folder: str) -> list[float]:
    accelerator, loader = prepared("three workers", True)
    assert loader.num_workers == 3
    loader.base_dataloader.num_workers = 2
    accelerator.load_state(f"{folder}/2")
    return [float(sample[0]) for batch in loader for sample in batch]


def test_with_other_workers_the_samples_are_right_at_least(tmp_path: Path) -> None:
    (whole,) = run_world(trained, 1, "three workers", str(tmp_path), 0, [2])
    (rest,) = run_world(with_other_workers, 1, str(tmp_path))
    assert rest == [sample[0] for batch, _ in whole[2 : SAMPLES // BATCH] for sample in batch]


class NoisyNowAndThen(Noisy):
    """Draws from one generator always, and from another one sometimes."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(np.random.rand()) if index % 8 < 2 else 0.0])


KINDS |= {
    "workers, now and then": (NoisyNowAndThen, {"num_workers": 1}, {}),
    "workers that begin alike": (
        Noisy,
        {"num_workers": 2, "persistent_workers": True, "worker_init_fn": seeded_by_itself},
        {},
    ),
    "here, without draws": (Plain, {"shuffle": True}, {}),
    "workers, without draws": (Plain, {"shuffle": True, "num_workers": 1}, {}),
    "stateful, without draws": (Plain, {"shuffle": True}, {"use_stateful_dataloader": True}),
}


def test_what_a_worker_seldom_draws_from_is_kept_by_a_chain_of_runs(tmp_path: Path) -> None:
    whole = run_world(trained, 1, "workers, now and then", str(tmp_path), 0, [2])
    for start, saves in ((2, [3]), (3, [])):
        resumed = run_world(trained, 1, "workers, now and then", str(tmp_path), start, saves)
        assert resumed == [seen[start:] for seen in whole]


def noted(kind: str) -> Any:
    _, loader = prepared(kind, True)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    return loader.position.snapshot(loader).drawn


@pytest.mark.parametrize("kind", ["here, without draws", "workers, without draws"])
def test_nothing_is_kept_of_a_dataset_that_draws_nothing(kind: str) -> None:
    assert run_world(noted, 1, kind) == [{"before": {}, "workers": {}}]


def broken_off(kind: str, folder: str, start: str | None) -> dict[str, list[Any]]:
    """An epoch that is not read to its end, and then whole ones; what is seen from each checkpoint on."""
    accelerator, loader = prepared(kind, True)
    since: dict[str, list[Any]] = {}

    def seen(what: Any, save_as: str | None = None) -> None:
        for noted in since.values():
            noted.append(what)
        if save_as is not None and start is None:
            accelerator.save_state(f"{folder}/{save_as}")
            since[save_as] = []

    if start is not None:
        since[start] = []
        accelerator.load_state(f"{folder}/{start}")
    for epoch in range(loader.iteration, EPOCHS):
        for number, batch in enumerate(loader):
            seen([batch.tolist(), draws()], "within" if epoch == 1 and number == 0 else None)
            if epoch == 0 and number == 3:
                break
        seen(draws(), f"after {epoch}")
    accelerator.end_training()
    return since


@pytest.mark.parametrize("kind", ["here", "three workers", "workers that stay", "stateful, without draws"])
def test_an_epoch_may_have_been_broken_off_before(kind: str, tmp_path: Path) -> None:
    (whole,) = run_world(broken_off, 1, kind, str(tmp_path), None)
    for start in ("after 0", "within", "after 1"):
        (resumed,) = run_world(broken_off, 1, kind, str(tmp_path), start)
        assert resumed[start] == whole[start], start


def back_in_the_same_process(folder: str) -> tuple[list[Any], list[Any]]:
    accelerator, loader = prepared("workers that stay", True)
    list(loader)
    accelerator.save_state(folder)
    first = [batch.tolist() for batch in loader]
    accelerator.load_state(folder)
    return first, [batch.tolist() for batch in loader]


def test_workers_that_stay_go_back_to_what_they_were(tmp_path: Path) -> None:
    ((first, again),) = run_world(back_in_the_same_process, 1, str(tmp_path / "saved"))
    assert again == first


class ByWhom(Plain):
    def __getitem__(self, index: int) -> int:
        info: Any = get_worker_info()
        return info.id


def skipped_by_hand() -> Any:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(ByWhom(), batch_size=BATCH, num_workers=2))
    return next(iter(accelerator.skip_first_batches(loader, 3))).tolist()


def after_a_rest(skip: int | None) -> Any:
    """What workers that stay, and begin with fixed numbers, draw in the first epoch that they read."""
    accelerator, loader = prepared("workers that begin alike", True)
    if skip is not None:
        list(accelerator.skip_first_batches(loader, skip))
    return [batch[:, 1:3].tolist() for batch in loader]


def test_without_a_checkpoint_workers_know_nothing_of_those_of_another_loader() -> None:
    assert run_world(after_a_rest, 1, 3) == run_world(after_a_rest, 1, None)


def test_without_a_checkpoint_the_first_worker_reads_the_first_batch() -> None:
    assert run_world(skipped_by_hand, 1) == [[0, 0]]


class Broken(NoisyStream):
    """Cannot be read any more."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise OSError("gone")


KINDS["here, gone"] = (Broken, {}, {"dispatch_batches": False})


def states_after_an_error(folder: str) -> tuple[list[float], list[float]]:
    accelerator, loader = prepared("here, gone", True)
    accelerator.load_state(folder)
    expected = draws()
    accelerator.load_state(folder)
    with pytest.raises(OSError, match="gone"):
        next(iter(loader))
    return expected, draws()


def test_a_dataset_that_cannot_be_read_leaves_the_random_states_that_were_loaded(tmp_path: Path) -> None:
    run_world(trained, 1, "here, a stream", str(tmp_path), 0, [2])
    ((expected, found),) = run_world(states_after_an_error, 1, f"{tmp_path}/2")
    assert found == expected


class Short(Noisy):
    """Its last step has too few samples for all, and takes one from the start of the epoch."""

    def __len__(self) -> int:
        return 11


def dispatched_and_filled(settings: dict[str, Any], folder: str, stop: int, start: int) -> list[Any]:
    settings = dict(settings)
    config = DataLoaderConfiguration(dispatch_batches=True, exact_resume=True, **settings.pop("config", {}))
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(3)
    loader = accelerator.prepare(DataLoader(Short(), batch_size=2, **settings))
    if start:
        accelerator.load_state(f"{folder}/{start}")
    seen: list[Any] = []
    for batch in loader:
        seen.append(batch.tolist())
        if start + len(seen) == stop:
            accelerator.save_state(f"{folder}/{stop}")
            break
    accelerator.end_training()
    return [*seen, draws()]


@pytest.mark.parametrize(
    "settings",
    [{}, {"shuffle": True}, {"shuffle": True, "config": {"use_seedable_sampler": True}}],
    ids=["in order", "shuffled", "seedable"],
)
def test_a_filled_up_batch_repeats_what_was_drawn_at_the_start(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = run_world(dispatched_and_filled, 2, settings, str(tmp_path), 9, 0)
    run_world(dispatched_and_filled, 2, settings, str(tmp_path), 1, 0)
    run_world(dispatched_and_filled, 2, settings, str(tmp_path), 2, 1)  # by a run that was resumed itself
    for start in (1, 2):
        rest = run_world(dispatched_and_filled, 2, settings, str(tmp_path), 9, start)
        assert rest == [seen[start:] for seen in whole]
