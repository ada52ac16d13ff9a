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
