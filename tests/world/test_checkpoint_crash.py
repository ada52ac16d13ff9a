"""Killed at any moment of a save, a run goes on from the old state or from the new one, whole."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpoint import disk
from accelerate.utils import ProjectConfiguration
from tests.harness import run_world, world_outcomes
from tests.unit.accelerator.toys import ALONE, Net

# How many times more moments than in the usual run of the tests: see `make soak`.
SOAK = int(os.environ.get("SOAK", "1"))
STEPS = ("write", "sync", "make_folder", "rename", "remove", "remove_tree")


class Version:
    """A run of which everything is the same number, so that a mixture of two states shows."""

    def __init__(self, folder: str, automatic: bool) -> None:
        self.folder = None if automatic else os.path.join(folder, "same")
        config = ProjectConfiguration(folder, automatic_checkpoint_naming=automatic, total_limit=1)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        net = Net()
        self.model, self.optimizer = self.accelerator.prepare(net, torch.optim.SGD(net.parameters(), momentum=0.9))
        self.accelerator.register_for_checkpointing(self)
        self.value = -1
        self.set(0)

    def set(self, value: int) -> None:
        self.value = value
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)
                self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
        torch.manual_seed(value)

    def values(self) -> set[float]:
        found = {float(v) for p in self.model.parameters() for v in p.detach().flatten()}
        for state in self.optimizer.state.values():
            found |= {float(v) for v in state["momentum_buffer"].flatten()}
        return found | {float(self.value), float(torch.initial_seed())}

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]

    def save(self, behind: bool = False) -> None:
        self.accelerator.save_state(self.folder, async_save=behind)

    def loaded(self) -> int:
        """Load what is there; the number that everything has."""
        self.set(-7)
        self.accelerator.load_state(self.folder)
        found = self.values()
        assert len(found) == 1, found
        return int(found.pop())


def _in_child(work: Callable[[], None]) -> int:
    """Run something in a forked process and return its status: negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _killing_at(number: int, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, killed just before its `number`-th step on the disk."""

    def counted() -> None:
        left = number

        def before(step: Callable[..., Any]) -> Callable[..., Any]:
            def stepping(*args: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(*args)

            return stepping

        for name in STEPS:
            setattr(disk, name, before(getattr(disk, name)))
        work()

    return counted


def _every_step(folder: str, automatic: bool) -> tuple[int, int, int]:
    run = Version(folder, automatic)
    run.save()
    value, kills, old, new = 0, 0, 0, 0
    for number in range(1, 1000):
        run.accelerator.project_configuration.iteration = value + 1 if automatic else 0
        run.set(value + 1)
        status = _in_child(_killing_at(number, run.save))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
        found = run.loaded()
        assert found in (value, value + 1), (number, found)
        old, new = old + (found == value), new + (found == value + 1)
        if found == value + 1:
            value = found
    assert run.loaded() == value + 1
    run.accelerator.project_configuration.iteration = value + 2
    run.set(value + 2)
    run.save()
    # What the dead have left behind is gone.
    names = os.listdir(os.path.join(folder, "checkpoints" if automatic else "same"))
    assert not [name for name in names if name.startswith(".")], names
    if automatic:
        assert names == [f"checkpoint_{value + 2}"]
    assert run.loaded() == value + 2
    return kills, old, new


@pytest.mark.parametrize("automatic", [False, True])
def test_killed_before_every_step(tmp_path: Path, automatic: bool) -> None:
    [(kills, old, new)] = run_world(_every_step, 1, str(tmp_path), automatic, env=ALONE)
    assert kills > 40 and old > 20 and new >= 2


def _random_moments(folder: str, automatic: bool, behind: bool, times: int) -> tuple[int, int]:
    run = Version(folder, automatic)
    run.save()
    value, finished, killed = 0, 0, 0
    choose = random.Random(5)
    longest = 0.0
    for _ in range(times):
        value = run.loaded()
        run.accelerator.project_configuration.iteration = value + 1 if automatic else 0
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            for number in range(value + 1, value + 4):
                run.set(number)
                run.save(behind)
            run.accelerator.wait_for_checkpoint()
            os._exit(0)
        if longest == 0.0:
            os.waitpid(pid, 0)
            longest = time.monotonic() - started
            continue
        time.sleep(choose.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finished, killed = finished + (status == 0), killed + (status < 0)
        assert value <= run.loaded() <= value + 3
    return finished, killed


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
@pytest.mark.parametrize("automatic", [False, True], ids=["same folder", "automatic"])
def test_killed_at_random_moments(tmp_path: Path, automatic: bool, behind: bool) -> None:
    times = 101 * SOAK
    world = run_world(_random_moments, 1, str(tmp_path), automatic, behind, times, env=ALONE, timeout=100 * SOAK)
    [(finished, killed)] = world
    assert finished + killed == times - 1 and killed > times // 3


def _two_ranks(folder: str, automatic: bool, victim: int, number: int) -> int:
    """Save twice; in the second save rank `victim` is killed before its `number`-th step or exchange."""
    run = Version(folder, automatic)
    run.save()
    run.set(1)
    if run.accelerator.process_index != victim:
        run.save()
        return 0
    plain: Any = type(run.accelerator._communicator)
    left = number

    def before(step: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **kwargs)

        return stepping

    for name in STEPS:
        setattr(disk, name, before(getattr(disk, name)))
    for name in ("gather_objects", "broadcast_objects", "barrier"):
        setattr(plain, name, before(getattr(plain, name)))
    run.save()
    return number - left


def _load_two(folder: str, automatic: bool) -> int:
    run = Version(folder, automatic)
    found = run.loaded()
    assert set(run.accelerator._communicator.gather_objects(found)) == {found}
    return found


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_is_killed(tmp_path: Path, automatic: bool, victim: int) -> None:
    (tmp_path / "whole").mkdir()
    steps = run_world(_two_ranks, 2, str(tmp_path / "whole"), automatic, victim, 10**6)[victim]
    assert steps > 20
    seen = set()
    stride = max(1, steps // (9 * SOAK))
    for number in sorted({*range(1, steps, stride), steps - 1, steps}):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcomes = world_outcomes(_two_ranks, 2, str(folder), automatic, victim, number, grace=0.1)
        assert outcomes[victim].signal == "SIGKILL"
        found = run_world(_load_two, 2, str(folder), automatic)
        assert found[0] in (0, 1)
        seen.add(found[0])
    assert 0 in seen
