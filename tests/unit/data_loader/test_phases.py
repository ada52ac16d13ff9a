"""The phases of a loader: which one follows which, and what the loader that a script holds knows in each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader.epoch import Snapshot
from accelerate.data_loader.position import Phase

SAMPLES, BREAK = 14, 3


class Watched(Dataset):
    """Calls a function whenever it is read."""

    watch: Callable[[], None] | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if self.watch is not None:
            self.watch()
        return index


def prepared(**options: Any) -> tuple[Accelerator, Any]:
    torch.manual_seed(options.pop("seed", 1))
    config = DataLoaderConfiguration(**({"exact_resume": True} | options))
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return accelerator, accelerator.prepare(DataLoader(Watched(), 2, shuffle=True))


def saved_inside(folder: Path, **options: Any) -> list[list[int]]:
    """A checkpoint after some batches of the first epoch; returns all of its batches."""
    accelerator, loader = prepared(**options)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        if number == BREAK - 1:
            accelerator.save_state(folder)
    return seen


def test_an_epoch_is_read_or_left() -> None:
    _, loader = prepared()
    position = loader.position
    assert position.phase is Phase.BETWEEN
    for _ in loader:
        assert position.phase is Phase.READING
        for _ in loader:  # once more, inside
            break
        assert position.phase is Phase.READING
    assert position.phase is Phase.BETWEEN
    for _ in loader:
        break
    assert position.phase is Phase.LEFT
    assert len(list(loader)) == SAMPLES // 2 and position.phase is Phase.BETWEEN


@pytest.mark.parametrize("exact", [True, False])
def test_a_checkpoint_is_resumed_from_any_phase(tmp_path: Path, exact: bool) -> None:
    saved_inside(tmp_path)
    accelerator, loader = prepared(exact_resume=exact)
    position, phases = loader.position, []
    loader.dataset.watch = lambda: phases.append(position.phase)
    loops: list[Any] = [iter(loader), iter(loader)]
    for number in range(4):  # from BETWEEN, READING, LEFT and LOADED
        accelerator.load_state(tmp_path)
        assert position.phase is Phase.LOADED
        if number == 0:
            next(loops[0])
        elif number == 1:
            next(loops[1])
            loops[1].close()
            assert position.phase is Phase.LEFT
    phases.clear()
    for _ in loader:
        assert position.phase is Phase.READING
    # Only its first batch is fetched with the random states that its order came from.
    assert phases[:2] == [Phase.RESUMING] * 2 and set(phases[2:]) == {Phase.READING}
    loops[0].close()  # begun before the last load, it is no loop of this run any more
    assert position.phase is Phase.BETWEEN


def test_a_first_batch_that_cannot_be_read_leaves_the_loop(tmp_path: Path) -> None:
    saved_inside(tmp_path)
    accelerator, loader = prepared(seed=2)
    accelerator.load_state(tmp_path)
    expected = torch.rand(1)
    accelerator.load_state(tmp_path)

    def fail() -> None:
        raise OSError("gone")

    loader.dataset.watch = fail
    with pytest.raises(OSError, match="gone"):
        next(iter(loader))
    assert loader.position.phase is Phase.LEFT and torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("dispatched", [False, True])
def test_the_loader_of_the_script_is_the_one_that_is_read(tmp_path: Path, dispatched: bool) -> None:
    """There is no other one inside of it, whose flags a script could not see."""
    whole = saved_inside(tmp_path, dispatch_batches=dispatched)
    accelerator, loader = prepared(seed=2, dispatch_batches=dispatched)
    accelerator.load_state(tmp_path)
    ends, rest = [], []
    for batch in loader:
        assert accelerator.gradient_state.active_dataloader is loader
        ends.append(loader.end_of_dataloader)
        rest.append(batch.tolist())
    assert rest == whole[BREAK:] and ends == [False] * (len(rest) - 1) + [True]


@pytest.mark.parametrize("exact", [True, False])
def test_a_stateful_loader_takes_the_position_of_one_that_was_not(tmp_path: Path, exact: bool) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    whole = saved_inside(tmp_path / "0")
    # The second checkpoint has a state of the stateful loader itself, which leads there with or without `exact_resume`.
    for number, start in enumerate((BREAK if exact else 0, BREAK + 1)):
        accelerator, loader = prepared(seed=2, exact_resume=exact, use_stateful_dataloader=True)
        accelerator.load_state(tmp_path / str(number))
        seen = []
        for batch in loader:
            seen.append(batch.tolist())
            if start + len(seen) == BREAK + 1:
                accelerator.save_state(tmp_path / str(number + 1))
        assert seen == whole[start:]


def test_a_snapshot_is_a_dict_of_its_names_and_older_ones_lack_some() -> None:
    _, loader = prepared()
    snapshot = loader.position.snapshot(loader)
    with pytest.raises(AttributeError):
        snapshot.epoch = 3  # it is frozen
    state = snapshot.state_dict()
    assert Snapshot.from_state_dict(state | {"of a later version": 1}).state_dict() == state
    for name in ("drawn", "order", "broken", "after", "dataset"):
        del state[name]
    older = Snapshot.from_state_dict(state)
    assert (older.drawn, older.order, older.broken, older.after, older.dataset) == (None,) * 5
    loader.position.load(older, loader)
    assert len(list(loader)) == SAMPLES // 2


def test_a_checkpoint_without_a_position_leaves_none_of_an_earlier_one(tmp_path: Path) -> None:
    whole = saved_inside(tmp_path / "inside")
    Accelerator(cpu=True).save_state(tmp_path / "none")
    accelerator, loader = prepared(seed=2)
    accelerator.load_state(tmp_path / "inside")
    assert loader.position.phase is Phase.LOADED
    accelerator.load_state(tmp_path / "none")
    assert loader.position.phase is Phase.BETWEEN
    assert len(list(loader)) == len(whole)
    batches = iter(loader)
    next(batches)
    accelerator.load_state(tmp_path / "none")  # a loop that is being served goes on, and counts as an epoch
    assert loader.position.phase is Phase.READING
    epoch = loader.iteration
    assert len(list(batches)) == len(whole) - 1 and loader.iteration == epoch + 1
