"""The prepared scheduler: how far it moves, and the schedules it warns of."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, TorchTensorParallelConfig
from tests.harness import run_world
from tests.unit.accelerator.toys import Net, loader


def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """A schedule in the manner of transformers."""
    return max(0.0, 1 - step / num_training_steps) if step >= num_warmup_steps else step / num_warmup_steps


def linear_schedule(optimizer: Any, steps: int) -> Any:
    return lr_scheduler.LambdaLR(optimizer, functools.partial(linear, num_warmup_steps=1, num_training_steps=steps))


SCHEDULES: dict[str, Any] = {
    "onecycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps),
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
    "linear": linear_schedule,
    "polynomial": lambda optimizer, steps: lr_scheduler.PolynomialLR(optimizer, total_iters=steps),
}


def run(
    schedule: Any,
    *,
    total: Any,
    samples: int,
    epochs: int,
    accumulation: int = 1,
    loader_too: bool = True,
    **kwargs: Any,
) -> list[str]:
    """Train with a schedule of `total(loader before, loader after)` steps; returns the warnings."""
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, **kwargs)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    plain = loader(samples)
    if loader_too:
        model, batches = accelerator.prepare(net, plain)
    else:
        model, batches = accelerator.prepare(net), plain
    scheduler = schedule(optimizer, total(plain, batches))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # torch's, of layers as small as these
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        for _ in range(epochs):
            for _ in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1, 4)).sum())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def _divided() -> None:
    first = int(PartialState().is_main_process)  # who says it
    for name, schedule in SCHEDULES.items():
        # Known at prepare: whole epochs of the sharded loader. Said as a fact, since 1.5 epochs may be meant, and once.
        found = run(schedule, total=lambda _, after: 3 * len(after), samples=40, epochs=8)
        assert len(found) == first and all("steps, or 1.5 epochs: " in text for text in found), (name, found)
        # Known at run time only: the schedule ends long before training does. Said once.
        found = run(schedule, total=lambda _, after: 3 * len(after) + 1, samples=40, epochs=8)
        assert len(found) == first and all("but training continues" in text for text in found), (name, found)


def _right() -> None:
    for name, schedule in SCHEDULES.items():
        for samples in (32, 36, 44, 13) if name == "cosine" else (44,):
            for accumulation in (1, 2, 3):
                for total in (
                    lambda before, _: 3 * len(before),
                    # As the scripts of diffusers and transformers compute it.
                    lambda before, after: 3 * 2 * math.ceil(len(after)),
                    lambda before, after: 3 * math.ceil(math.ceil(len(before) / 2) / accumulation) * 2,  # noqa: B023
                ):
                    case = {"samples": samples, "epochs": 3, "accumulation": accumulation}
                    found = run(schedule, total=total, **case)
                    assert found == [], (name, case, found)
        divided = lambda _, after: 3 * len(after)  # noqa: E731
        assert run(schedule, total=divided, samples=40, epochs=3, step_scheduler_with_optimizer=False) == []
        split = DataLoaderConfiguration(split_batches=True)
        assert run(schedule, total=divided, samples=40, epochs=3, dataloader_config=split) == []
    warmup = lambda optimizer, steps: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps)  # noqa: E731
    assert run(warmup, total=lambda *_: 3, samples=40, epochs=4) == []
    hold = lambda optimizer, steps: lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=steps)  # noqa: E731
    assert run(hold, total=lambda *_: 3, samples=40, epochs=4) == []
    step = lambda optimizer, steps: lr_scheduler.StepLR(optimizer, step_size=steps)  # noqa: E731
    assert run(step, total=lambda *_: 3, samples=40, epochs=4) == []
    for schedule in SCHEDULES.values():
        assert run(schedule, total=lambda before, _: len(before) * 3 // 2, samples=40, epochs=1) == []  # one and a half
        assert with_evaluation(schedule) == []
        # One batch, and a step of two processes in each epoch.
        assert run(schedule, total=lambda before, _: 6 * len(before), samples=4, epochs=6) == []


def with_evaluation(schedule: Any) -> list[str]:
    """The loader to evaluate with is shorter, and prepared in the same call."""
    GradientState._reset_state()
    accelerator, net = Accelerator(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    training, evaluation = loader(80), loader(32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(net, optimizer, training, evaluation, schedule(optimizer, 3 * len(training)))
        evaluation = accelerator.prepare(loader(32))
        assert len(evaluation) == 4
        accelerator.prepare(schedule(optimizer, 3 * len(training)))
    return [str(warning.message) for warning in caught]


def _tensor_parallel_alone() -> None:
    """All ranks together take one batch at a time, as one process does: no schedule can have been divided."""
    for schedule in SCHEDULES.values():
        for total in (lambda _, after: 3 * len(after), lambda *_: 7):
            found = run(schedule, total=total, samples=40, epochs=8, parallelism_config=tensor_parallel())
            assert found == [], found


def _mesh() -> None:
    """Two ranks share each batch, so four take two of them at a time."""
    first = int(PartialState().is_main_process)
    mesh: dict[str, Any] = {"parallelism_config": tensor_parallel(dp_shard_size=2), "fsdp_plugin": fsdp2()}
    schedule = SCHEDULES["cosine"]
    found = run(schedule, total=lambda _, after: 3 * len(after), samples=40, epochs=1, **mesh)
    assert len(found) == first, found
    for text in found:
        assert text.startswith("This schedule of 15 steps ends after 7 optimizer steps, or 1.5 epochs: ")
        assert "moves 2 steps (one per share of the data) each time" in text
    found = run(schedule, total=lambda _, after: 3 * len(after) + 1, samples=40, epochs=8, **mesh)
    assert len(found) == first and all("moves 2 steps (one per share of the data) " in text for text in found), found
    assert run(schedule, total=lambda before, _: 3 * len(before), samples=40, epochs=3, **mesh) == []


def tensor_parallel(**sizes: int) -> ParallelismConfig:
    handler = TorchTensorParallelConfig(plan={"first": "colwise", "last": "rowwise"})
    return ParallelismConfig(tp_size=2, tp_handler=handler, **sizes)


def fsdp2() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )


def test_under_tensor_parallelism_alone_a_schedule_is_that_of_one_process() -> None:
    run_world(_tensor_parallel_alone, 2)


def test_on_a_mesh_a_schedule_is_measured_in_shares_of_the_data() -> None:
    run_world(_mesh, 4)


def test_a_schedule_that_was_divided_already_is_said_once() -> None:
    run_world(_divided, 2)


def test_right_schedules_are_silent() -> None:
    run_world(_right, 2)


def test_one_process_never_warns() -> None:
    for schedule in (SCHEDULES["cosine"], SCHEDULES["linear"]):
        assert run(schedule, total=lambda *_: 3, samples=40, epochs=3) == []


def make() -> tuple[Accelerator, Any, Any, AcceleratedScheduler]:
    accelerator = Accelerator()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return accelerator, *accelerator.prepare(net, optimizer, lr_scheduler.StepLR(optimizer, 1, gamma=0.5))


def step(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any) -> None:
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    scheduler.step()


def test_it_looks_like_the_scheduler_inside(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, _, scheduler = made = make()
    step(*made)
    assert scheduler.get_last_lr() == [0.5]
    assert scheduler.last_epoch == scheduler.scheduler.last_epoch == 1
    assert scheduler.gamma == 0.5
    with pytest.raises(AttributeError):
        _ = scheduler.no_such_thing
    state = scheduler.state_dict()
    assert state["last_epoch"] == 1
    step(*made)
    scheduler.load_state_dict(state)
    assert scheduler.last_epoch == 1


def test_it_pickles_and_copies() -> None:
    _, _, _, scheduler = make()
    for twin in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert isinstance(twin, AcceleratedScheduler)
        assert twin.get_last_lr() == [1.0]


def test_metrics_are_passed_on() -> None:
    accelerator, model, optimizer, _ = make()
    plateau = accelerator.prepare(lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=0, factor=0.1))
    for value in (1.0, 1.0, 1.0):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        plateau.step(value)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def accumulated(schedule: Any, *args: Any) -> tuple[Any, AcceleratedScheduler]:
    """Eight micro-batches in windows of two."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, schedule(optimizer))
    for _ in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            scheduler.step(*args)
            optimizer.zero_grad()
    return optimizer, scheduler


def test_metrics_under_accumulation() -> None:
    optimizer, _ = accumulated(lambda inner: lr_scheduler.ReduceLROnPlateau(inner, patience=0, factor=0.1), 1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_one_cycle_under_accumulation_goes_to_its_end() -> None:
    _, scheduler = accumulated(lambda inner: lr_scheduler.OneCycleLR(inner, max_lr=0.1, total_steps=5))
    assert scheduler.last_epoch == 4
    assert scheduler.get_last_lr()[0] == pytest.approx(scheduler.optimizer.param_groups[0]["min_lr"])


class TimmLike:
    """Not one of torch's: it is told the epoch, and perhaps a metric."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.told: list[Any] = []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.told.append((epoch, metric))


def _plateau() -> tuple[list[float], list[Any]]:
    accelerator, model, optimizer, _ = make()
    plateau = accelerator.prepare(lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=1, factor=0.1))
    other = accelerator.prepare_scheduler(TimmLike(optimizer.optimizer))  # type: ignore[arg-type]
    rates = []
    for epoch in range(7):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        plateau.step(metrics=1.0)
        other.step(epoch, metric=1.0)
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
    return rates, other.told


def test_a_metric_is_one_step_on_any_number_of_processes() -> None:
    expected = [1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.001], [(epoch, 1.0) for epoch in range(7)]
    assert _plateau() == expected
    PartialState._reset_state()
    AcceleratorState._reset_state()
    assert run_world(_plateau, 2) == [expected, expected]


def by_epochs(where: str, schedule: Any, samples: int = 32, **kwargs: Any) -> list[str]:
    """Train for four epochs with a scheduler that is stepped somewhere; returns the warnings."""
    GradientState._reset_state()
    accelerator, net = Accelerator(**kwargs), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model, optimizer, batches, scheduler = accelerator.prepare(net, optimizer, loader(samples), schedule(optimizer))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # torch's, of one that comes first
        for epoch in range(4):
            if where == "before the epoch":
                scheduler.step()
            for number, (x, _y) in enumerate(batches):
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).mean())
                    optimizer.step()
                    if where == "each batch" or (where == "after a warmup" and epoch > 0):
                        scheduler.step()
                    optimizer.zero_grad()
                if where == "every other batch" and number % 2 == 1:
                    scheduler.step()
            if where == "after the epoch":
                scheduler.step(*[epoch] * isinstance(scheduler.scheduler, lr_scheduler.ReduceLROnPlateau))
    assert all(warning.filename == __file__ for warning in caught), [str(warning) for warning in caught]
    return [str(warning.message) for warning in caught]


def _by_epochs() -> None:
    first = int(PartialState().is_main_process)
    milestones = lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 6])  # noqa: E731
    for where in ("before the epoch", "after the epoch"):
        for steps in (1, 2):
            found = by_epochs(where, milestones, gradient_accumulation_steps=steps)
            assert len(found) == first, (where, found)
            for text in found:
                assert text.startswith(f"This MultiStepLR is stepped once after {4 // steps} optimizer steps, behind")
                assert "(one per process)" in text and "`step_scheduler_with_optimizer=False`" in text
    for where in ("each batch", "every other batch", "after a warmup"):
        for steps in (1, 2, 3):
            assert by_epochs(where, milestones, gradient_accumulation_steps=steps) == []
    plateau = lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer)  # noqa: E731
    assert by_epochs("after the epoch", plateau) == []
    assert by_epochs("after the epoch", milestones, samples=8) == []  # one step in each epoch
    assert by_epochs("after the epoch", milestones, step_scheduler_with_optimizer=False) == []
    split = DataLoaderConfiguration(split_batches=True)
    assert by_epochs("after the epoch", milestones, dataloader_config=split) == []


def test_a_scheduler_that_is_stepped_behind_the_loop() -> None:
    run_world(_by_epochs, 2)


def test_a_scheduler_that_is_stepped_behind_the_loop_of_one_process() -> None:
    assert by_epochs("after the epoch", lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 6])) == []


def test_a_scheduler_without_its_optimizer_follows_all() -> None:
    accelerator, _, optimizer, _ = make()
    other = accelerator.prepare(lr_scheduler.StepLR(torch.optim.SGD(Net().parameters(), lr=1.0), 1))
    assert other.optimizers == [optimizer]


def _one_cycle() -> float:
    accelerator = Accelerator()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=7)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, schedule)
    for _ in range(4):
        step(accelerator, model, optimizer, scheduler)
    return float(scheduler.get_last_lr()[0])


def test_one_cycle_stops_at_its_end() -> None:
    rates = run_world(_one_cycle, 2)
    net = Net()
    schedule = lr_scheduler.OneCycleLR(torch.optim.SGD(net.parameters(), lr=0.01), max_lr=0.1, total_steps=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(7):
            schedule.step()
    assert rates[0] == rates[1] == pytest.approx(schedule.get_last_lr()[0])


@pytest.mark.parametrize(("steps", "warnings_said"), [(7, 0), (10, 1)])
def test_one_cycle_of_one_process_says_that_it_has_ended(steps: int, warnings_said: int) -> None:
    """Where torch would end the training."""
    accelerator = Accelerator(cpu=True)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=7)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(accelerator, model, optimizer, scheduler)
    assert len(caught) == warnings_said
    assert all("OneCycleLR has come to its end after 7 steps, but" in str(each.message) for each in caught)
