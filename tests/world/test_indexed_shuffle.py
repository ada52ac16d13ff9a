"""Shuffling without a list of indices, on two processes: one order, however it is read and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from tests.harness import run_world

SAMPLES = 70


def read(folder: Path, dispatch: bool, seed_of_rank: bool) -> dict[str, Any]:
    config = DataLoaderConfiguration(
        shuffle="indexed", dispatch_batches=dispatch, exact_resume=True, data_seed=None if seed_of_rank else 3
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(range(SAMPLES), batch_size=5, shuffle=True))  # type: ignore[arg-type]
    epochs = [[accelerator.gather_for_metrics(batch).tolist() for batch in loader] for _ in range(2)]
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    accelerator.save_state(folder)
    following = [accelerator.gather_for_metrics(batch).tolist() for batch in batches]
    accelerator.load_state(folder)
    resumed = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    return {"epochs": epochs, "following": following, "resumed": resumed}


def alone(folder: Path) -> list[int]:
    """The rest of the epoch, on one process."""
    config = DataLoaderConfiguration(shuffle="indexed", exact_resume=True, data_seed=3)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(range(SAMPLES), batch_size=5, shuffle=True))  # type: ignore[arg-type]
    accelerator.load_state(folder)
    return [index for batch in loader for index in batch.tolist()]


@pytest.mark.parametrize("dispatch", [False, True])
def test_one_order_on_all_processes(tmp_path: Path, dispatch: bool) -> None:
    first, second = run_world(read, 2, tmp_path / "x", dispatch, False)
    assert first == second
    for epoch in first["epochs"]:
        assert sorted(index for batch in epoch for index in batch) == list(range(SAMPLES))
    assert first["epochs"][0] != first["epochs"][1]
    assert first["resumed"] == first["following"] and len(first["resumed"]) == 4
    if not dispatch:
        (rest,) = run_world(alone, 1, tmp_path / "x")
        assert rest == [index for batch in first["following"] for index in batch]


def test_the_seed_is_that_of_the_first_process(tmp_path: Path) -> None:
    first, second = run_world(read, 2, tmp_path / "x", False, True)
    assert first == second
