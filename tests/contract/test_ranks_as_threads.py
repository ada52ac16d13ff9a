"""Ranks that are threads of one process, as some devices run them: a device of its own kind, with its communicator."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, devices
from accelerate.comm import Communicator, current
from accelerate.comm.torch_dist import Joined
from accelerate.devices import CPU, Choice
from accelerate.environments import World
from accelerate.per_rank import ranks_are_threads
from accelerate.state import GradientState, PartialState
from tests.contract import test_toy_engine
from tests.contract.test_training import TOY
from tests.contract.toy_engine import Toy
from tests.harness import run_world
from tests.unit.accelerator.toys import weights

RANKS = 2


class Between(Communicator):
    """Passes values between the threads of one process."""

    size = RANKS
    values: list[Any] = [None] * RANKS
    meet = threading.Barrier(RANKS, timeout=60)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def barrier(self) -> None:
        self.meet.wait()

    def gather_objects(self, value: Any) -> list[Any]:
        self.values[self.rank] = copy.deepcopy(value)
        self.meet.wait()
        found = copy.deepcopy(self.values)
        self.meet.wait()
        return found

    def side_channel(self) -> tuple[Any, Any]:
        return BetweenHelpers(self.rank).gather_objects, None

    def gather(self, tensors: list[torch.Tensor], keys: tuple[str | int, ...] = ()) -> list[torch.Tensor]:
        return [torch.cat(parts) for parts in zip(*self.gather_objects(tensors), strict=True)]

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        together = torch.stack(self.gather_objects(tensor.detach()))
        return tensor.copy_({"sum": together.sum(0), "min": together.amin(0), "max": together.amax(0)}[op])

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor.copy_(self.gather_objects(tensor)[source])

    def broadcast_objects(self, values: list[Any], source: int = 0) -> None:
        values[:] = self.gather_objects(values)[source]


class BetweenHelpers(Between):
    """The same for the threads behind the training."""

    values: list[Any] = [None] * RANKS
    meet = threading.Barrier(RANKS, timeout=60)


class Threads(CPU):
    """A device whose ranks are threads: it knows which one this is, and how they talk."""

    def join(self, world: World, options: dict[str, Any], attempt: int = 0) -> Joined:
        rank = int(threading.current_thread().name)
        return Joined(World(rank, RANKS, local_rank=rank, local_size=RANKS, started_by="test"), "threads")

    def communicator(self, device: torch.device) -> Communicator:
        return Between(int(threading.current_thread().name))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOY", "1")
    monkeypatch.setattr(devices, "choose", lambda *args: Choice(Threads(), None, "the test says so"))
    ranks_are_threads()
    yield
    ranks_are_threads(False)


def on_every_rank(function: Any, *args: Any) -> list[Any]:
    results: list[Any] = [None] * RANKS
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(*args)
        except BaseException as error:
            errors.append(error)
            Between.meet.abort()

    Between.meet.reset()
    BetweenHelpers.meet.reset()
    ranks = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if errors:
        raise errors[0]
    return results


def _who() -> tuple[int, int, int, bool]:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    accelerator.gradient_state._set_sync_gradients(accelerator.is_main_process)
    current().barrier()
    return PartialState().process_index, current().rank, accelerator.num_processes, GradientState().sync_gradients


def test_each_has_a_state_of_its_own(threads: None) -> None:
    assert on_every_rank(_who) == [(0, 0, 2, True), (1, 1, 2, False)]


def test_they_train_as_processes_do(threads: None) -> None:
    found = on_every_rank(test_toy_engine._weights_after_training)
    expected = run_world(test_toy_engine._weights_after_training, RANKS, env=TOY)
    for rank in range(RANKS):
        assert torch.equal(found[rank], expected[rank])


def _asks_whether_to_stop() -> str:
    with pytest.raises(RuntimeError) as caught:
        _ = Accelerator().should_stop
    return str(caught.value)


def test_signals_are_for_processes(threads: None) -> None:
    for rank, message in enumerate(on_every_rank(_asks_whether_to_stop)):
        assert message.startswith(f"Rank {rank} is a thread, and signals reach processes: leave `preemption` and")


def test_each_numbers_its_runs(threads: None) -> None:
    from accelerate.tracking import local

    assert on_every_rank(lambda: [next(local._numbers.get()) for _ in range(2)]) == [[0, 1], [0, 1]]


def _saves_and_loads(folder: str, behind: bool) -> bool:
    accelerator, model, optimizer, batches = test_toy_engine._prepared()
    test_toy_engine._train(accelerator, model, optimizer, batches, upto=2)
    saved = weights(model)
    accelerator.save_state(folder, async_save=behind)
    test_toy_engine._train(accelerator, model, optimizer, batches)
    changed = not torch.equal(weights(model), saved)
    accelerator.load_state(folder)
    return changed and torch.equal(weights(model), saved)


@pytest.mark.parametrize("behind", [False, True])
def test_they_save_together(behind: bool, threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "can_copy_aside", True)
    assert on_every_rank(_saves_and_loads, str(tmp_path / "checkpoint"), behind) == [True, True]
