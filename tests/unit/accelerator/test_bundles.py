"""What `prepare` sorts, and what scripts do with its parts: override them, wrap things themselves, pass them twice."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.engines.wrappers import DoneByEngine
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import GradScalerKwargs
from tests.harness import run_world
from tests.unit.accelerator.toys import Net, loader


def made() -> tuple[Net, torch.optim.Optimizer, LambdaLR]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, LambdaLR(optimizer, lambda _: 1.0)


class Noting(Accelerator):
    calls: list[str]

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("model")
        return super().prepare_model(model, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("optimizer")
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        self.calls.append("scheduler")
        return super().prepare_scheduler(scheduler)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("loader")
        return super().prepare_data_loader(data_loader, *args, **kwargs)


def test_methods_that_a_subclass_overrides_are_called() -> None:
    accelerator = Noting(cpu=True)
    accelerator.calls = []
    model, optimizer, scheduler = made()
    got = accelerator.prepare(loader(), scheduler, optimizer, model)
    assert sorted(accelerator.calls) == ["loader", "model", "optimizer", "scheduler"]
    assert isinstance(got[1], AcceleratedScheduler) and isinstance(got[2], AcceleratedOptimizer) and got[3] is model
    assert got[1].optimizers == [got[2]]


def test_methods_that_are_patched_are_called() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = made()
    with mock.patch.object(accelerator, "prepare_model", return_value="a model") as patched:
        assert accelerator.prepare(model, optimizer)[0] == "a model"
    assert patched.call_args.args[0] is model


def test_wrappers_that_a_script_has_made_are_kept() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = made()
    wrapped = AcceleratedOptimizer(optimizer)
    follows = AcceleratedScheduler(scheduler, wrapped)
    assert accelerator.prepare(model, wrapped, follows)[1:] == (wrapped, follows)
    assert accelerator._optimizers == [wrapped] and accelerator._schedulers == [follows]


class Proxy:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_proxy_of_something_prepared_is_not_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = made()
    _, _, prepared = accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(accelerator.prepare_scheduler(Proxy(prepared)), AcceleratedScheduler)  # type: ignore[arg-type]


def test_the_same_object_twice(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = made()
    got = accelerator.prepare(model, optimizer, scheduler, model, optimizer, scheduler)
    assert got[0] is got[3] and got[1] is got[4] and got[2] is got[5]
    assert len(accelerator._models) == len(accelerator._optimizers) == len(accelerator._schedulers) == 1
    accelerator.save_state(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / "model_1.safetensors").exists()


def test_a_model_that_names_a_kind_by_accident() -> None:
    class Named(Net):
        prepared_as = "loaders"
        _accelerate_kind = "nothing"

    model = Named()
    assert Accelerator(cpu=True).prepare(model) is model


def _taken_over(version: int, order: str) -> bool:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=True))
    model = Net()
    optimizer: Any = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    second = Accelerator()
    if order == "om":
        optimizer, model = second.prepare(optimizer, model)
    else:
        model, optimizer = second.prepare(model, optimizer)
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return mine == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("order", ["om", "mo"])
@pytest.mark.parametrize("version", [1, 2])
def test_an_optimizer_of_another_accelerator_gets_the_sharded_parameters(version: int, order: str) -> None:
    assert run_world(_taken_over, 2, version, order) == [True, True]


def test_another_optimizer_inside_is_the_one_that_steps() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = made()
    model, prepared = accelerator.prepare(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared.optimizer = other
    before = [p.detach().clone() for p in model.parameters()]
    accelerator.backward(model(torch.ones(1, 4)).sum())
    prepared.step()
    assert prepared.optimizer is other and prepared.param_groups is other.param_groups
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def fp16() -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40)])
    model, optimizer, _ = made()
    return accelerator, *accelerator.prepare(model, optimizer)


def test_a_scaler_that_is_taken_away() -> None:
    _, model, optimizer = fp16()
    optimizer.scaler = None
    model(torch.ones(1, 4)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_a_scaler_that_is_assigned_leaves_the_other_ways_of_stepping_alone() -> None:
    accelerator = Accelerator(cpu=True, nonfinite="skip")
    model, optimizer, _ = made()
    model, prepared = accelerator.prepare(model, optimizer)
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")):
        prepared.scaler = scaler
        loss = model(torch.ones(1, 4)).sum() * float("nan")
        accelerator.backward(loss if prepared.scaler is None else prepared.scaler.scale(loss))
        prepared.step()
        prepared.zero_grad()
        assert prepared.step_was_skipped and all(p.isfinite().all() for p in model.parameters())
    own = AcceleratedOptimizer(optimizer, stepper=DoneByEngine(optimizer, "skipped"))
    own.scaler = None
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    own.step()  # of which the engine has taken care
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_copies_know_that_a_step_was_skipped() -> None:
    accelerator, model, optimizer = fp16()
    accelerator.backward(model(torch.ones(1, 4)).sum() * 1e30)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert copy.deepcopy(optimizer).step_was_skipped
    assert pickle.loads(pickle.dumps(optimizer)).step_was_skipped


def test_a_model_that_cannot_be_placed_leaves_no_loader_behind() -> None:
    class Refusing(Net):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of memory")

    accelerator = Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        accelerator.prepare(Refusing(), loader())
    assert accelerator._dataloaders == []


def test_an_engine_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    earlier = accelerator.prepare(loader())

    def fail(model: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(accelerator, "_compile", fail)
    model, optimizer, scheduler = made()
    with pytest.raises(RuntimeError, match="no compiler"):
        accelerator.prepare(loader(), optimizer, scheduler, model)
    assert accelerator._dataloaders == [earlier]
    assert (accelerator._models, accelerator._optimizers, accelerator._schedulers) == ([], [], [])
    monkeypatch.undo()
    accelerator.prepare(loader(), optimizer, scheduler, model)
    assert len(accelerator._dataloaders) == 2 and len(accelerator._models) == 1
