"""Killed at any moment of a save, a run goes on from the old state or from the new one, whole."""

from __future__ import annotations

import gc
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
from accelerate.comm import current
from accelerate.io import disk
from accelerate.utils import ProjectConfiguration
from tests.harness import run_world, world_outcomes
from tests.unit.accelerator.toys import ALONE, Net
from tests.world.crashing import EXCHANGES, STEPS, forked, kill_at, two_ranks

# How many times more moments than in the usual run of the tests: see `make soak`.
SOAK = int(os.environ.get("SOAK", "1"))


class Version:
    """A run of which everything is the same number, so that a mixture of two states shows."""

    def __init__(self, folder: str, automatic: bool) -> None:
        self.folder = None if automatic else os.path.join(folder, "same")
        config = ProjectConfiguration(folder, automatic_checkpoint_naming=automatic, total_limit=1)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        net = Net()
        self.model, self.optimizer = self.accelerator.prepare(net, torch.optim.SGD(net.parameters(), momentum=0.9))
        self.accelerator.register_for_checkpointing(self)
        self.accelerator.register_save_state_pre_hook(self._write_own)
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

    def _write_own(self, models: Any, weights: Any, folder: str) -> None:
        """A folder in the checkpoint, as models write that save themselves."""
        if self.accelerator.is_local_main_process:
            os.mkdir(os.path.join(folder, "own"))
            Path(folder, "own", "value").write_text(str(self.value))

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
        if self.folder is not None:
            found.add(float(Path(self.folder, "own", "value").read_text()))
        assert len(found) == 1, found
        return int(found.pop())


def _every_moment(folder: str, automatic: bool, behind: bool, apart: bool) -> dict[str, tuple[int, int, int]]:
    """Kill rank 0, rank 1, and both at once, at every moment of a save on two ranks, one after the other.

    apart: the ranks are on two machines that share no disk, and each machine keeps all files.
    """
    os.chdir(folder)
    run = Version(".", automatic)
    run.accelerator.project_configuration.save_on_each_node = apart
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    run.accelerator.load_state(run.accelerator.save_state("first"))  # so that forks find everything imported
    run.accelerator.project_configuration.automatic_checkpoint_naming = automatic
    machines = [Path(folder, f"machine{rank}") for rank in (0, 1)] if apart else None
    for machine in machines or ():
        machine.mkdir()
    gc.freeze()  # forks then copy less
    attempts = 0

    def load_and_save(victim: int | None = None, both: bool = False, number: int = 0) -> tuple[int, list[int]]:
        """What the last attempt has left, and how the ranks ended that loaded it and saved the next number."""

        def work(rank: int, other: int, tell: Callable[[Any], None]) -> None:
            found = run.loaded() if attempts > 1 else 0
            tell(found)
            current().barrier()
            run.set(found + 1)
            if rank == victim:
                kill_at(number, (other,) if both else ())
            run.save(behind)
            run.accelerator.wait_for_checkpoint()

        nonlocal attempts
        attempts += 1
        run.accelerator.project_configuration.iteration = attempts
        (first, found), (second, same) = two_ranks(work, machines)
        assert found == same is not None, (victim, both, number, found, same)
        return found, [first, second]

    before, statuses = load_and_save()
    counts = {}
    for victim in (0, 1):
        for both in (False, True):
            old = new = 0
            for number in range(1, 1000):
                found, following = load_and_save(victim, both, number)
                assert found in (before, before + 1), (victim, both, number, found)
                if number > 1:
                    old, new = old + (found == before), new + (found == before + 1)
                if statuses == [0, 0]:
                    assert found == before + 1
                before, statuses = found, following
                if statuses == [0, 0]:
                    break
                assert statuses[victim] == -signal.SIGKILL
            counts[f"rank {victim}{' and the other' if both else ''}"] = (old, new, number)
    found, statuses = load_and_save()
    assert found == before + 1 and statuses == [0, 0]
    # What the dead have left behind is gone.
    for machine in machines or [Path(folder)]:
        names = os.listdir(machine / ("checkpoints" if automatic else "same"))
        assert not [name for name in names if name.startswith(".")], names
        if automatic:
            assert names == [f"checkpoint_{attempts}"]
    return counts


WAYS = {
    "same folder, at once": (False, False, False),
    "same folder, behind": (False, True, False),
    "automatic, at once": (True, False, False),
    "automatic, behind": (True, True, False),
}
if SOAK > 1:
    WAYS["same folder, two disks"] = (False, False, True)
    WAYS["same folder, two disks, behind"] = (False, True, True)
    WAYS["automatic, two disks"] = (True, False, True)
    WAYS["automatic, two disks, behind"] = (True, True, True)


@pytest.mark.parametrize(("automatic", "behind", "apart"), WAYS.values(), ids=WAYS)
def test_killed_at_every_moment(tmp_path: Path, automatic: bool, behind: bool, apart: bool) -> None:
    [counts] = run_world(_every_moment, 1, str(tmp_path), automatic, behind, apart, env=ALONE, timeout=300)
    for who, (old, new, moments) in counts.items():
        assert old + new == moments - 1 and old > 5 and new >= (2 if who.startswith("rank 0") else 0), (who, old, new)


def _random_moments(folder: str, automatic: bool, behind: bool, times: int) -> None:
    """Kill saves after any time, before which none, one or two others were begun and ended."""
    run = Version(folder, automatic)
    started = time.monotonic()
    run.save()
    length = time.monotonic() - started
    choose = random.Random(5)
    for _ in range(times):
        value, others = run.loaded(), choose.randrange(3)
        run.accelerator.project_configuration.iteration = value + 1 if automatic else 0

        def work(tell: Callable[[Any], None], value: int = value, others: int = others) -> None:
            for number in range(value + 1, value + 1 + others):
                run.set(number)
                run.save(behind)
            run.accelerator.wait_for_checkpoint()
            run.set(value + others + 1)
            tell("now")
            run.save(behind)
            signal.pause()

        pid, reading = forked(work)
        assert os.read(reading, 1)
        time.sleep(choose.uniform(0, length))
        os.kill(pid, signal.SIGKILL)
        os.close(reading)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert run.loaded() - value in (others, others + 1)


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
@pytest.mark.parametrize("automatic", [False, True], ids=["same folder", "automatic"])
def test_killed_at_random_moments(tmp_path: Path, automatic: bool, behind: bool) -> None:
    run_world(_random_moments, 1, str(tmp_path), automatic, behind, 53 * SOAK, env=ALONE, timeout=100 * SOAK)


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
    for name in EXCHANGES:
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
    assert steps >= 8
    seen = set()
    stride = max(1, steps // (4 * SOAK))
    for number in sorted({*range(1, steps, stride), steps - 1, steps}):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcomes = world_outcomes(_two_ranks, 2, str(folder), automatic, victim, number, grace=0.1)
        assert outcomes[victim].signal == "SIGKILL"
        found = run_world(_load_two, 2, str(folder), automatic)
        assert found[0] in (0, 1)
        seen.add(found[0])
    assert 0 in seen
