"""`backward(loss_sum, num_items=n)`: the gradients of one big batch, however it was cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from tests.harness import run_world, world_outcomes
from tests.unit.accelerator.toys import Net, assert_same_everywhere, gradients, loader, relative_error, weights


def fresh(steps: int = 1, handlers: list[Any] | None = None, precision: str = "no", **plugin: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(
        mixed_precision=precision,
        kwargs_handlers=handlers,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps, **plugin),
    )


def loss_sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(dim=1, keepdim=True)).square().sum()


def split(samples: int, parts: int, chance: random.Random) -> list[slice]:
    """Cut a range at random places; parts may be empty."""
    cuts = sorted(chance.randint(0, samples) for _ in range(parts - 1))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, samples], strict=True)]


def by_hand(dtype: torch.dtype, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    model = Net(seed).to(dtype)
    (loss_sum(model, x.to(dtype)) / len(x)).backward()
    return gradients(model)


def _random_splits(dtype: torch.dtype, handlers: list[Any], tolerance: float, plugin: dict[str, Any]) -> float:
    worst = 0.0
    for seed in range(12):
        chance = random.Random(seed)
        steps = chance.choice([1, 2, 3, 5])
        samples = chance.choice([7, 64, 1000])
        accelerator = fresh(steps, handlers, **plugin)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
        net = Net().to(dtype)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        expected = by_hand(torch.float64, x)
        for _ in range(3):  # the later windows start from another factor
            parts = split(samples, steps * ranks, chance)[rank::ranks]
            for part in parts:
                with accelerator.accumulate(model):
                    mine = x[part].to(dtype)
                    count: Any = len(mine)
                    count = chance.choice([count, float(count), torch.tensor(count), torch.tensor([float(count)])])
                    accelerator.backward(loss_sum(model, mine), num_items=count)
                    if accelerator.sync_gradients:
                        worst = max(worst, relative_error(gradients(model), expected))
                        assert worst < tolerance, (seed, steps, samples, worst)
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                        torch.testing.assert_close(norm.double(), expected.norm(), rtol=1e-5, atol=0)
                        torch.testing.assert_close(gradients(model).norm().item(), 0.1, rtol=1e-3, atol=0)
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same_everywhere(weights(model))
    return worst


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_any_split_gives_the_gradients_of_one_batch(processes: int) -> None:
    double = torch.float64
    run_world(_random_splits, processes, double, [], 1e-12, {})
    run_world(_random_splits, processes, torch.float32, [], 1e-6, {})


def test_with_bucket_views_and_syncs_at_each_batch() -> None:
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    run_world(_random_splits, 2, torch.float64, [views], 1e-12, {})
    run_world(_random_splits, 2, torch.float64, [views], 1e-12, {"sync_each_batch": True})
    run_world(_random_splits, 2, torch.float64, [], 1e-12, {"sync_each_batch": True})


def _epoch_with_a_partial_window(precision: str) -> torch.Tensor:
    """7 batches per rank in windows of 3; every window must be the step of one big batch."""
    accelerator = fresh(3, [GradScalerKwargs(init_scale=64.0)], precision)
    ranks = accelerator.num_processes
    net = Net()
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader(28 * ranks, shuffle=False)
    )
    reference = Net()
    window: list[torch.Tensor] = []
    steps = 0
    for x, _ in batches:
        # A different number of samples on each rank and in each batch.
        x = x[: 1 + (len(window) + accelerator.process_index) % 4]
        window += accelerator._communicator.gather_objects(x)
        with accelerator.accumulate(model):
            accelerator.backward(loss_sum(model, x), num_items=len(x))
            if accelerator.sync_gradients:
                accelerator.unscale_gradients()
                reference.load_state_dict(accelerator.get_state_dict(model))
                reference.zero_grad()
                big = torch.cat(window)
                with accelerator.autocast():
                    loss = loss_sum(reference, big)
                (loss.float() / len(big)).backward()
                error = relative_error(gradients(model), gradients(reference))
                assert error < (1e-6 if precision == "no" else 5e-3), (steps, error)
                window, steps = [], steps + 1
            optimizer.step()
            optimizer.zero_grad()
    assert steps == 3
    assert_same_everywhere(weights(model))
    return weights(model)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_the_last_partial_window(precision: str) -> None:
    for processes in (1, 2):
        run_world(_epoch_with_a_partial_window, processes, precision)


def _various() -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rank = PartialState().process_index
    mine = x[:5] if rank == 0 else x[5:]

    def check(accelerator: Accelerator, run: Callable[[Any], None], expected: torch.Tensor) -> None:
        net = Net().double()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        for _ in range(2):
            run(model)
            assert relative_error(gradients(model), expected) < 1e-12
            optimizer.step()
            optimizer.zero_grad()

    expected = by_hand(torch.float64, x)

    # Nothing on one rank.
    accelerator = fresh()

    def all_on_rank_0(model: Any) -> None:
        part = x if rank == 0 else x[:0]
        accelerator.backward(loss_sum(model, part), num_items=len(part))

    check(accelerator, all_on_rank_0, expected)

    # Two losses before one step, with gradients brought to their final size in between.
    accelerator = fresh()

    def two_losses(model: Any) -> None:
        accelerator.backward(loss_sum(model, mine[:2]), num_items=2)
        accelerator.backward(loss_sum(model, mine[2:]), num_items=len(mine) - 2)

    check(accelerator, two_losses, expected)

    # A window without items on any rank has no mean.
    accelerator = fresh()
    model = accelerator.prepare(Net())
    with pytest.raises(ValueError, match="num_items is 0 on all ranks"):
        accelerator.backward(model(torch.ones(1, 4)).sum() * 0, num_items=0)


def test_nothing_on_one_rank_and_two_losses() -> None:
    run_world(_various, 2)


def _two_models(own_windows: bool) -> None:
    """Two models trained in turns, each with a mean over its own items."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    accelerator = fresh(2)
    rank = accelerator.process_index
    nets = [Net(0).double(), Net(1).double()]
    prepared = accelerator.prepare(*nets, *[torch.optim.SGD(net.parameters(), lr=0.0) for net in nets])
    pairs = list(zip(prepared[:2], prepared[2:], strict=True))
    pieces = [[x[0:3], x[3:4], x[4:9], x[9:10]], [x[10:12], x[12:19], x[19:20], x[20:24]]]
    expected = [by_hand(torch.float64, torch.cat(parts), seed) for seed, parts in enumerate(pieces)]
    for _ in range(3):
        for micro in range(2):
            for index, (model, optimizer) in enumerate(pairs):
                with accelerator.accumulate(model):
                    part = pieces[index][2 * micro + rank]
                    accelerator.backward(loss_sum(model, part), num_items=len(part))
                    if own_windows:
                        if accelerator.sync_gradients:
                            assert relative_error(gradients(model), expected[index]) < 1e-12, index
                        optimizer.step()
                        optimizer.zero_grad()
        if not own_windows:
            for index, (model, optimizer) in enumerate(pairs):
                assert relative_error(gradients(model), expected[index]) < 1e-12, index
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("own_windows", [True, False])
def test_two_models_in_turns(own_windows: bool) -> None:
    run_world(_two_models, 2, own_windows)


def test_two_models_without_accumulation() -> None:
    accelerator = Accelerator()
    x = torch.randn(12, 4, dtype=torch.float64)
    nets = [Net(0).double(), Net(1).double()]
    models = accelerator.prepare(*nets)
    optimizers = accelerator.prepare(*[torch.optim.SGD(net.parameters(), lr=0.0) for net in nets])
    for _ in range(2):
        for model, part in zip(models, (x[:3], x[3:]), strict=True):
            accelerator.backward(loss_sum(model, part), num_items=len(part))
        for seed, (model, part) in enumerate(zip(models, (x[:3], x[3:]), strict=True)):
            assert relative_error(gradients(model), by_hand(torch.float64, part, seed)) < 1e-12
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _an_optimizer_that_was_not_prepared() -> None:
    accelerator = fresh(2)
    model = accelerator.prepare(Net())
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    parts = x.split([3, 1, 6, 2, 5, 3, 4, 1, 2, 4, 5, 4])
    ranks = accelerator.num_processes
    for start in range(0, len(parts), 2 * ranks):
        window = parts[start : start + 2 * ranks]
        for part in window[accelerator.process_index :: ranks]:
            with accelerator.accumulate(model):
                accelerator.backward(loss_sum(model, part), num_items=len(part))
        assert relative_error(gradients(model), by_hand(torch.float64, torch.cat(window))) < 1e-6
        for parameter in model.parameters():
            parameter.grad = None


@pytest.mark.parametrize("processes", [1, 2])
def test_an_update_by_hand_ends_the_window(processes: int) -> None:
    run_world(_an_optimizer_that_was_not_prepared, processes)


def test_parameters_outside_of_models_and_shared_ones() -> None:
    accelerator = Accelerator()
    x = torch.randn(10, 4)
    loose = nn.Parameter(torch.ones(1))
    net = Net()
    accelerator.prepare_model(net.first)  # a part of the model, prepared by itself as well
    model, optimizer = accelerator.prepare(net, torch.optim.SGD([*net.parameters(), loose], lr=0.0))
    accelerator.backward((model(x) * loose).sum(), num_items=10)
    mine = gradients(model), loose.grad.clone()
    optimizer.zero_grad()
    (model(x) * loose).mean().backward()
    torch.testing.assert_close(mine, (gradients(model), loose.grad))


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), torch.tensor([1, 2]), "five"])
def test_wrong_numbers(wrong: Any) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    with pytest.raises(ValueError, match=r"num_items is .* on rank 0: give the number of items") as caught:
        accelerator.backward(model(torch.ones(1, 4)).sum(), num_items=wrong)
    assert "\n" not in str(caught.value)


def test_a_window_that_mixes_both_kinds_of_loss() -> None:
    accelerator = fresh(2)
    model = accelerator.prepare(Net())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 4)).sum(), num_items=1)
    with accelerator.accumulate(model), pytest.raises(ValueError, match="both with and without `num_items`"):
        accelerator.backward(model(torch.ones(1, 4)).sum())


def _fails() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    accelerator.backward(model(torch.ones(1, 4)).sum(), num_items=-3)


def test_the_error_names_the_rank() -> None:
    for outcome in world_outcomes(_fails, 2):
        assert f"num_items is -3 on rank {outcome.rank}" in outcome.message
