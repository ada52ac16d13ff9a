"""A training of Megatron-LM goes on from its checkpoint exactly, and says what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpoint.load import verify_checkpoint
from accelerate.checkpoint.parts import File
from accelerate.errors import CheckpointError
from accelerate.utils import MegatronLMDummyScheduler
from tests.harness import run_world, world_outcomes
from tests.megatron import training
from tests.world.crashing import kill_at

WAYS: dict[str, dict[str, Any]] = {
    "tensors": {"tp_degree": 2},
    "stages": {"pp_degree": 2, "num_micro_batches": 2},
    "shards": {"use_distributed_optimizer": True},
    "small": {"tp_degree": 2, "precision": "bf16"},
    "scaled": {"precision": "fp16", "other_megatron_args": {"initial_loss_scale": 1024.0}},
}


class Training:
    """A training with dropout and a schedule, so that random states and steps count."""

    def __init__(self, precision: str = "no", **settings: Any) -> None:
        settings = {"custom_train_step_class": training.OwnTrainStep, "attention_dropout": 0.1, **settings}
        self.acc = training.accelerator(precision, hidden_dropout=0.1, **settings)
        net, optimizer, loader = training.objects(self.acc)
        net.config.resid_pdrop = net.config.attn_pdrop = 0.1
        torch.manual_seed(5)
        scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=4)
        self.net, self.optimizer, self.loader, self.scheduler = self.acc.prepare(net, optimizer, loader, scheduler)
        self.batches = iter(self.loader)

    def steps(self, count: int) -> list[Any]:
        found = []
        for _ in range(count):
            loss = self.net(**next(self.batches))
            self.acc.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            found.append((loss.item(), float(self.net.grad_norm), self.scheduler.get_last_lr()[0]))
        return found

    def end(self) -> dict[str, torch.Tensor]:
        weights = {name: value.detach().clone() for name, value in self.net.named_parameters()}
        training.end(self.acc)
        return weights


def goes_on(folder: str, ways: dict[str, dict[str, Any]]) -> None:
    for name, settings in ways.items():
        first = Training(**settings)
        first.steps(3)
        path = first.acc.save_state(Path(folder, name))
        wanted = first.steps(3)
        weights = first.end()
        second = Training(**settings)
        second.steps(1)
        second.acc.load_state(path)
        second.batches = iter(second.loader)
        assert second.net.iteration == 3
        assert second.steps(3) == wanted, name
        for key, value in second.end().items():
            assert torch.equal(value, weights[key]), (name, key)


def test_goes_on_exactly(tmp_path: Path) -> None:
    run_world(goes_on, 2, str(tmp_path), WAYS, timeout=150)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert "tensors/iter_0000003/mp_rank_01/model_optim_rng.pt" in names
    assert "stages/iter_0000003/mp_rank_00_001/model_optim_rng.pt" in names
    assert "shards/iter_0000003/mp_rank_00/distrib_optim.pt" in names
    assert (tmp_path / "stages/latest_checkpointed_iteration.txt").read_text() == "3"
    for way in WAYS:
        described = verify_checkpoint(tmp_path / way)
        assert described["strategy"] == "MEGATRON_LM" and any(name.startswith("iter_") for name in described["files"])
    run_world(on_fewer_copies, 1, str(tmp_path / "shards"), timeout=100)


def on_fewer_copies(folder: str) -> None:
    """One copy of the model goes on with what two have saved, shards of the optimizer as well."""
    alone = Training(use_distributed_optimizer=True)
    alone.acc.load_state(folder)
    assert alone.net.iteration == 3
    rate = alone.scheduler.get_last_lr()[0]
    alone.batches = iter(alone.loader)
    loss, _, following = alone.steps(1)[0]
    assert 0 < loss < 4.3 and 0 < rate != following
    training.end(alone.acc)


def keeps_what_was_saved(folder: str) -> None:
    path = Path(folder, "run")
    run = Training(pp_degree=2)
    run.steps(1)
    run.acc.save_state(path)
    run.steps(1)
    own = File.write
    if run.acc.process_index == 1:
        File.write = _fails  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="Rank 1 could not write"):
        run.acc.save_state(path)
    File.write = own  # type: ignore[method-assign]
    run.acc.load_state(path)
    assert run.net.iteration == 1
    run.acc.save_state(Path(folder, "behind"), async_save=True)
    run.steps(1)
    run.acc.wait_for_checkpoint()
    run.acc.load_state(Path(folder, "behind"))
    assert run.net.iteration == 1
    training.end(run.acc)
    other = Training(tp_degree=2)
    with pytest.raises(CheckpointError, match="saved with tp_degree=1 and pp_degree=2, but here they are 2 and 1"):
        other.acc.load_state(path)
    training.end(other.acc)
    weights = Training(pp_degree=2, no_load_optim=True)
    weights.acc.load_state(path)
    assert not weights.net.optimizer.chained_optimizers[0].optimizer.state
    training.end(weights.acc)


def _fails(self: File, folder: Path, group: Any = None) -> dict[str, Any]:
    raise OSError(28, "No space left on device")


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    run_world(keeps_what_was_saved, 2, str(tmp_path), timeout=100)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["behind", "run"], "and nothing beside it"


# Of the first stage, which puts the files of both in their place: in the middle of a file, with half of the files in
# place, and with half of the old ones gone. Of the second: in the middle of a file.
MOMENTS = ((0, 9), (0, 60), (0, 66), (1, 6))


def whole_state(run: Training) -> dict[str, Any]:
    """What this stage has: its weights, what its optimizer knows of them, and how far it is."""
    optimizer = run.net.optimizer.chained_optimizers[0].optimizer
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    weights = [parameter.detach().clone() for parameter in run.net.parameters()]
    return {"tensors": weights + moments, "rate": run.scheduler.get_last_lr(), "iteration": run.net.iteration}


def killed(folder: str, victim: int, moment: int) -> None:
    """Saves to one folder after each of two steps; one stage is killed at some moment of the second save."""
    run = Training(pp_degree=2)
    for number in (1, 2):
        run.steps(1)
        torch.save(whole_state(run), Path(folder, f"{number}_of_{run.acc.process_index}.pt"))
        run.acc.wait_for_everyone()
        if number == 2 and run.acc.process_index == victim:
            kill_at(moment)
        run.acc.save_state(Path(folder, "same"))


def loaded(folders: list[str]) -> list[int]:
    """Which of the two states is in each folder, on this stage."""
    run = Training(pp_degree=2)
    run.steps(1)
    found = []
    for folder in folders:
        run.acc.load_state(Path(folder, "same"))
        here = whole_state(run)
        saved = torch.load(Path(folder, f"{here['iteration']}_of_{run.acc.process_index}.pt"))
        assert here["rate"] == saved["rate"]
        assert all(torch.equal(one, other) for one, other in zip(here["tensors"], saved["tensors"], strict=True))
        found.append(here["iteration"])
    training.end(run.acc)
    return found


def test_a_save_that_is_killed_leaves_one_state_whole(tmp_path: Path) -> None:
    folders = []
    for victim, moment in MOMENTS:
        folder = tmp_path / f"{victim}_{moment}"
        folder.mkdir()
        folders.append(str(folder))
        outcomes = world_outcomes(killed, 2, str(folder), victim, moment, timeout=100, grace=1.0)
        assert outcomes[victim].signal == "SIGKILL", outcomes[victim]
    first, second = run_world(loaded, 2, folders, timeout=100)
    assert first == second, "both stages are where the other is"
    assert set(first) == {1, 2}, "some were killed before the new state was there, and some after"
