"""Scripts that save on the main process alone, while the others go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.checkpoint import agreement
from accelerate.checkpointing import verify_checkpoint
from accelerate.errors import CheckpointError
from accelerate.torch_internals.process_groups import default_store
from accelerate.utils import ProjectConfiguration
from tests.harness import run_world
from tests.unit.accelerator.toys import Net, weights


class Script:
    def __init__(self, folder: str, exact: bool = False) -> None:
        config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        loading = DataLoaderConfiguration(exact_resume=exact, use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=True, project_config=config, dataloader_config=loading)
        torch.manual_seed(0)
        net = Net()
        data = DataLoader([torch.full((4,), float(i)) for i in range(24)], batch_size=2, shuffle=True)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(
            net, torch.optim.AdamW(net.parameters()), data
        )

    def step(self, batch: torch.Tensor) -> None:
        self.accelerator.backward(self.model(batch).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()


def _alone(folder: str, behind: bool) -> Any:
    agreement.rendezvous()._patience, agreement.KNOWN, agreement.QUIET = 0.3, 0.1, 0.0
    run = Script(folder)
    said: list[str] = []
    agreement.logger.addFilter(lambda record: bool(said.append(record.getMessage())))
    kept: dict[int, list[float]] = {}
    for number, batch in enumerate(run.batches):
        run.step(batch)
        if number in (1, 2, 4) and run.accelerator.is_main_process:
            said.clear()
            run.accelerator.save_state(async_save=behind)
            assert len(said) == 1 and "Rank 0 waits in save_state" in said[0]
            kept[number] = weights(run.model).tolist()
    run.accelerator.wait_for_checkpoint()
    run.accelerator.wait_for_everyone()
    names = sorted(os.listdir(Path(folder, "checkpoints")))
    about = verify_checkpoint(Path(folder, "checkpoints", names[-1]))
    run.accelerator.load_state()
    loaded = weights(run.model).tolist()
    assert not run.accelerator.is_main_process or loaded == kept[4]
    run.step(next(iter(run.batches)))  # all are still in step
    # And one that all call, which waits for the others as any.
    agreement.rendezvous()._patience = 60
    if not run.accelerator.is_main_process:
        time.sleep(0.5)
    last = run.accelerator.save_state()
    return names, about["world_size"], loaded, last.name, verify_checkpoint(last)["world_size"]


@pytest.mark.parametrize("behind", [False, True])
def test_the_main_process_saves_and_the_others_go_on(tmp_path: Path, behind: bool) -> None:
    first, second = run_world(_alone, 2, str(tmp_path), behind)
    assert first == second
    names, processes, _, last, at_last = first
    assert names == ["checkpoint_1", "checkpoint_2"] and processes == 1
    assert last == "checkpoint_3" and at_last == 2


def _late(folder: str) -> list[tuple[str, int]]:
    agreement.rendezvous()._patience = 0.2
    run = Script(folder)
    first = Path(folder, "checkpoints", "checkpoint_0")
    while not run.accelerator.is_main_process and not first.exists():
        time.sleep(0.01)
    run.accelerator.save_state()
    run.step(next(iter(run.batches)))
    agreement.rendezvous()._patience = 60
    second = run.accelerator.save_state()
    return [(path.name, verify_checkpoint(path)["world_size"]) for path in (first, second)]


def test_who_comes_late_goes_on_too(tmp_path: Path) -> None:
    assert run_world(_late, 2, str(tmp_path)) == [[("checkpoint_0", 1), ("checkpoint_1", 2)]] * 2


def _twice_at_one_point(folder: str) -> Any:
    """The main process alone, and then all, without a step in between."""
    agreement.rendezvous()._patience, agreement.KNOWN = 0.2, 0.2
    run = Script(folder)
    run.step(next(iter(run.batches)))
    if run.accelerator.is_main_process:
        run.accelerator.save_state()
    run.accelerator.wait_for_everyone()
    run.accelerator.save_state()
    run.step(next(iter(run.batches)))
    agreement.rendezvous()._patience = 60
    return verify_checkpoint(run.accelerator.save_state())["world_size"]


def test_two_saves_between_two_steps(tmp_path: Path) -> None:
    assert run_world(_twice_at_one_point, 3, str(tmp_path)) == [3] * 3


def _until_two_wait(store: Any) -> Iterator[float]:
    """Time is up as soon as two processes wait and have looked at each other."""
    count = dist.PrefixStore("test", default_store())  # `store` waits for an answer, and takes no other request
    count.add("waiting", 1)
    while count.add("waiting", 0) < 2:
        yield 0.0
        time.sleep(0.01)
    yield 0.0


def _who_comes_after_the_time(folder: str) -> tuple[str, int]:
    run = Script(folder)
    failed, said = dist.PrefixStore("failed", default_store()), ""
    if run.accelerator.process_index != 2:
        waiting, agreement._waiting = agreement._waiting, _until_two_wait
        with pytest.raises(CheckpointError) as caught:
            run.accelerator.save_state()
        agreement._waiting, said = waiting, str(caught.value)
        failed.add("failed", 1)
    while failed.add("failed", 0) < 2:
        time.sleep(0.01)
    return said, verify_checkpoint(run.accelerator.save_state())["world_size"]  # all call it again


def test_nobody_is_waited_for_without_end_and_a_save_can_be_tried_again(tmp_path: Path) -> None:
    (first, *sizes), (second, *_), _ = run_world(_who_comes_after_the_time, 3, str(tmp_path))
    assert sizes == [3]
    assert "Rank 0 waited" in first and "1 of the 2 other ranks arrived" in first
    assert "Rank 1 waited" in second and "did not call it" in second


def test_waiting_ends_with_the_patience_of_the_process_group() -> None:
    waits = list(agreement._waiting(SimpleNamespace(timeout=timedelta(seconds=0.02))))
    assert waits == sorted(waits) and waits[-1] < 0.02


def _seen(folder: str, stop: bool) -> list[float]:
    agreement.rendezvous()._patience = 0.2
    run = Script(folder, exact=True)
    if not stop:
        run.accelerator.load_state()
    seen = []
    for number, batch in enumerate(run.batches):
        run.step(batch)
        seen += batch[:, 0].tolist()
        if stop and number == 2:
            if run.accelerator.is_main_process:
                run.accelerator.save_state()
            break
    run.accelerator.wait_for_everyone()
    return seen


def test_every_sample_comes_once(tmp_path: Path) -> None:
    before = run_world(_seen, 2, str(tmp_path), True)
    after = run_world(_seen, 2, str(tmp_path), False)
    assert sorted(sample for seen in before + after for sample in seen) == list(range(24))


def _model_alone(folder: str) -> list[str]:
    run = Script(folder)
    if run.accelerator.is_main_process:
        run.accelerator.save_model(run.model, os.path.join(folder, "model"))
    run.step(next(iter(run.batches)))
    return os.listdir(os.path.join(folder, "model"))


def test_a_model_is_saved_by_the_main_process_alone(tmp_path: Path) -> None:
    assert run_world(_model_alone, 2, str(tmp_path)) == [["model.safetensors"]] * 2
