"""What an engine may own beside training: accumulation, loss division, the share of data, checkpoints."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from accelerate import Accelerator
from accelerate.errors import CheckpointError
from accelerate.strategies import Strategy, StrategyRow
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from tests.contract.test_training import TOY
from tests.contract.toy_engine import Toy, ToyLoader, ToyOptimizer
from tests.harness import run_world
from tests.unit.accelerator.toys import ALONE, Net, data, loader, weights

WORLDS = [pytest.param(1, ALONE | TOY, id="1"), pytest.param(2, TOY, id="2")]
BOTH = [*WORLDS, pytest.param(2, {}, id="ddp-2")]


def _train(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, upto: int | None = None) -> None:
    for number, (x, y) in enumerate(batches, start=1):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            optimizer.zero_grad()
        if number == upto:
            break


def _prepared(**settings: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2, **settings)
    plain = Net()
    batches = loader(16 * accelerator.num_processes)
    return accelerator, *accelerator.prepare(plain, torch.optim.Adam(plain.parameters(), lr=0.05), batches)


def _weights_after_training() -> torch.Tensor:
    accelerator, model, optimizer, batches = _prepared()
    assert isinstance(accelerator._strategy, Toy) == ("TOY" in os.environ)
    _train(accelerator, model, optimizer, batches)
    return weights(model)


@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_as_others_do(processes: int) -> None:
    alone = ALONE if processes == 1 else {}
    toy = run_world(_weights_after_training, processes, env=alone | TOY)
    plain = run_world(_weights_after_training, processes, env=alone)
    torch.testing.assert_close(toy[-1], plain[0], rtol=1e-5, atol=1e-6)


def _sum_over_items() -> torch.Tensor:
    accelerator, model, optimizer, batches = _prepared()
    for number, (x, y) in enumerate(batches):
        items = 1 + (number + accelerator.process_index) % 3
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x[:items]), y[:items], reduction="sum")
            accelerator.backward(loss, num_items=items)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_a_sum_over_items_is_not_divided_again() -> None:
    toy, plain = run_world(_sum_over_items, 2, env=TOY), run_world(_sum_over_items, 2)
    torch.testing.assert_close(toy[0], plain[0], rtol=1e-5, atol=1e-6)


def _makes_its_optimizer() -> bool:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="pass both to one call"):
        accelerator.prepare(ToyOptimizer(0.1))
    optimizer, model = accelerator.prepare(ToyOptimizer(0.1), Net())
    before = weights(model)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return not torch.equal(weights(model), before)


@pytest.mark.parametrize(("processes", "env"), WORLDS)
def test_an_optimizer_that_the_engine_makes(processes: int, env: dict[str, str | None]) -> None:
    assert all(run_world(_makes_its_optimizer, processes, env=env))


def _steps(inside: bool, **settings: Any) -> int:
    plugin = GradientAccumulationPlugin(num_steps=2, **settings)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    plain = Net()
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(plain, inner)
    steps = []
    inner.register_step_post_hook(lambda *_: steps.append(1))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            if inside:
                optimizer.step()
                optimizer.zero_grad()
        if not inside:
            optimizer.step()
            optimizer.zero_grad()
    return len(steps)


@pytest.mark.parametrize("settings", [{}, {"sync_each_batch": True}])
@pytest.mark.parametrize("inside", [True, False])
def test_it_steps_once_per_window(inside: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "1")
    assert _steps(inside, **settings) == 2


def test_a_loader_that_the_engine_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", "1")
    batches = Accelerator(cpu=True).prepare(ToyLoader(data(6)))
    assert [len(x) for x, _ in batches] == [2, 2, 2]


def _shares_data(dispatched: bool) -> dict[str, Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatched))
    plain = Net()
    inner = torch.optim.SGD(plain.parameters(), lr=1.0)
    schedule = LambdaLR(inner, float)
    model, optimizer, scheduler, batches = accelerator.prepare(plain, inner, schedule, loader(10))
    seen = [x for x, _ in batches]
    gathered = [accelerator.gather_for_metrics(x.sum(dim=1)) for x, _ in batches]
    single = accelerator.gather_for_metrics(torch.tensor(float(accelerator.process_index)))
    accelerator.backward(model(seen[0]).sum())
    optimizer.step()
    scheduler.step()
    return {"seen": seen, "gathered": torch.cat(gathered), "single": single, "lr": scheduler.get_last_lr()}


@pytest.mark.parametrize("dispatched", [False, True])
def test_processes_that_share_data(dispatched: bool) -> None:
    found = run_world(_shares_data, 2, dispatched, env=TOY | {"TOY_SHARES_DATA": "1"})
    everything = torch.cat([x for x, _ in loader(10)])
    for rank in found:
        assert torch.equal(torch.cat(rank["seen"]), everything)
        # Each sample once, and the values of the last stage.
        assert torch.equal(rank["gathered"], everything.sum(dim=1))
        assert rank["single"].tolist() == [1.0]
        assert rank["lr"] == [1.0]


def _resumed(folder: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Saved inside a window, after the third of four micro-batches."""
    accelerator, model, optimizer, batches = _prepared()
    _train(accelerator, model, optimizer, batches, upto=3)
    accelerator.save_state(folder, async_save=True)
    (rest,) = (accelerator.skip_first_batches(batches, 3),)
    _train(accelerator, model, optimizer, rest)
    undisturbed = weights(model)
    accelerator.free_memory()
    accelerator, model, optimizer, batches = _prepared()
    accelerator.load_state(folder)
    _train(accelerator, model, optimizer, accelerator.skip_first_batches(batches, 3))
    return undisturbed, weights(model), sorted(os.listdir(folder))


@pytest.mark.parametrize(("processes", "env"), WORLDS)
def test_it_writes_and_reads_its_own_files(processes: int, env: dict[str, str | None], tmp_path: Path) -> None:
    for undisturbed, resumed, files in run_world(_resumed, processes, str(tmp_path / "checkpoint"), env=env):
        assert torch.equal(resumed, undisturbed)
        assert not any(name.startswith(("model", "optimizer")) for name in files)
        assert [name for name in files if name.startswith("toy")] == [f"toy_state_{r}.bin" for r in range(processes)]


def _says_what_it_cannot(folder: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    accelerator, *_ = _prepared()
    accelerator.save_state(folder, async_save=True)
    accelerator.save_state(folder, async_save=True)
    accelerator.free_memory()
    accelerator.prepare(Net(hidden=3), Net())
    with pytest.raises(CheckpointError) as error:
        accelerator.load_state(folder)
    return [*said, str(error.value)]


def test_it_says_what_it_cannot_do(tmp_path: Path) -> None:
    (said,) = run_world(_says_what_it_cannot, 1, str(tmp_path / "checkpoint"), env=ALONE | TOY)
    assert len(said) == 2
    assert "the state of Toy cannot be copied while training continues" in said[0]
    assert "partly loaded before it failed" in said[1] and "load another checkpoint" in said[1]


class _Box(nn.Module):
    """A wrapper that keeps its model under another name than `module`."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> Any:
        return self.inside(x)


class Boxing(Strategy):
    """An engine that finds models in its wrapper by itself, and leaves the files to the base class."""

    def wrap(self, model: nn.Module, *, placed: bool) -> nn.Module:
        return _Box(model)

    def unwrap(self, model: nn.Module, **kwargs: Any) -> Any:
        found = super().unwrap(model, **kwargs)
        return super().unwrap(found.inside, **kwargs) if isinstance(found, _Box) else found


def test_what_an_engine_unwraps_itself_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.strategies.STRATEGIES", [StrategyRow(__name__, "Boxing", lambda state: True)])
    accelerator, model, optimizer, batches = _prepared(cpu=True)
    _train(accelerator, model, optimizer, batches, upto=3)
    accelerator.save_state(tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(Net().state_dict())
    saved, gradients = weights(model), [parameter.grad.clone() for parameter in model.parameters()]
    _train(accelerator, model, optimizer, batches)
    assert not torch.equal(weights(model), saved)
    accelerator.load_state(tmp_path)
    assert torch.equal(weights(model), saved)
    assert all(torch.equal(p.grad, own) for p, own in zip(model.parameters(), gradients, strict=True))
