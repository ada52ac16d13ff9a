"""When gradients are synchronized, whichever way a script walks its loaders."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin, patch_environment
from tests.unit.accelerator.toys import Net, gradients, loader, weights


def make(steps: int = 3, samples: int = 20, **plugin: Any) -> tuple[Accelerator, Any, Any, Any]:
    """An accelerator with a prepared model, optimizer and a loader of `samples / 4` batches."""
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps, **plugin))
    model = Net()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(samples))


def walk(accelerator: Accelerator, batches: Any, model: Any = None, hook: Any = None) -> list[bool]:
    synced = []
    for number, _ in enumerate(batches):
        with accelerator.accumulate(*([] if model is None else [model])):
            synced.append(accelerator.sync_gradients)
        if hook is not None:
            hook(number)
    return synced


def test_the_last_batch_syncs_and_the_count_restarts() -> None:
    accelerator, model, _, batches = make()
    for _ in range(2):
        assert walk(accelerator, batches, model) == [False, False, True, False, True]


def test_without_sync_with_dataloader_the_count_goes_on() -> None:
    accelerator, model, _, batches = make(sync_with_dataloader=False)
    assert walk(accelerator, batches, model) == [False, False, True, False, False]
    assert walk(accelerator, batches, model) == [True, False, False, True, False]


def test_the_step_counts_micro_batches_until_the_end_of_a_loader(tmp_path: Path) -> None:
    accelerator, model, _, batches = make()
    steps = [accelerator.step]
    walk(accelerator, batches, model, lambda number: steps.append(accelerator.step))
    assert steps == [0, 1, 2, 3, 4, 0]
    accelerator.gradient_accumulation_steps = 1
    for _ in range(2):
        with accelerator.accumulate(model):
            pass
    accelerator.save_state(tmp_path)
    assert torch.load(tmp_path / "random_states_0.pkl", weights_only=False)["step"] == 2
    other, *_ = make()
    other.load_state(tmp_path)
    assert other.step == 2
    other.free_memory()
    assert other.step == 0


def test_windows_go_on_from_a_step_that_is_set() -> None:
    accelerator, model, _, batches = make()
    synced = walk(accelerator, itertools.islice(batches, 4), model)
    accelerator.step = 2
    assert [*synced, *walk(accelerator, [1, 2], model)] == [False, False, True, False, True, False]
    assert accelerator.step == 4


def test_backward_divides_by_the_steps() -> None:
    accelerator, model, _, _ = make(4)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    divided = gradients(model)
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(divided * 4, gradients(model))


def test_optimizer_and_zero_grad_wait_for_the_sync() -> None:
    accelerator, model, optimizer, batches = make()
    steps = 0
    for x, _ in batches:
        with accelerator.accumulate(model):
            before = weights(model)
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            moved = not torch.equal(before, weights(model))
            assert moved == accelerator.sync_gradients
            assert (model.first.weight.grad is None) == moved
            steps += moved
    assert steps == 2


class Wrapped:
    """An iterator around another that keeps a reference to it, as progress bars do."""

    def __init__(self, iterable: Any) -> None:
        self.iterator = iter(iterable)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("wrap", [iter, enumerate, Wrapped, lambda loader: zip(loader, loader, strict=True)])
def test_an_evaluation_that_breaks_on_its_last_batch_changes_nothing(keep: bool, wrap: Any) -> None:
    accelerator, model, _optimizer, batches = make(4, samples=32)
    evaluation = accelerator.prepare(loader(8))
    kept = []

    def evaluate(number: int) -> None:
        if number != 0:
            return
        iterator = wrap(evaluation)
        for seen, _ in enumerate(iterator, start=1):
            if seen == 2:
                assert accelerator.gradient_state.end_of_dataloader
                break
        if keep:
            kept.append(iterator)

    assert walk(accelerator, batches, model, evaluate) == [False, False, False, True] * 2


def test_an_evaluation_before_the_accumulation_of_the_same_batch() -> None:
    accelerator, model, _, batches = make(4, samples=32)
    evaluation = accelerator.prepare(loader(8))
    synced = []
    for number, _ in enumerate(batches):
        if number == 1:
            for _ in evaluation:
                if accelerator.gradient_state.end_of_dataloader:
                    break
        with accelerator.accumulate(model):
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, False, True] * 2


def test_a_full_evaluation_inside_training() -> None:
    accelerator, model, _, batches = make(4, samples=32)
    evaluation = accelerator.prepare(loader(8))
    assert walk(accelerator, batches, model, lambda _: list(evaluation)) == [False, False, False, True] * 2
    assert not accelerator.gradient_state.in_dataloader
    assert accelerator.gradient_state.dataloader_references == [None]


def test_a_break_in_training_starts_afresh_with_the_loader_but_keeps_the_window() -> None:
    accelerator, model, _, batches = make(4, samples=32)
    assert walk(accelerator, itertools.islice(batches, 2), model) == [False, False]
    assert not accelerator.gradient_state.in_dataloader
    assert walk(accelerator, itertools.islice(batches, 3), model) == [False, True, False]


def test_zip_of_two_loaders_ends_with_the_shorter() -> None:
    accelerator, model, _, batches = make(3, samples=20)
    longer = accelerator.prepare(loader(28))
    assert walk(accelerator, zip(longer, batches, strict=False), model) == [False, False, True, False, True]


def test_a_client_that_sets_the_sync_itself() -> None:
    """The way transformers' Trainer does, without `accumulate`."""
    accelerator, model, optimizer, batches = make(2)
    moved = []
    for number, (x, _) in enumerate(batches):
        accelerator.gradient_state._set_sync_gradients(number % 2 == 1 or accelerator.gradient_state.end_of_dataloader)
        before = weights(model)
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, weights(model)))
    assert moved == [False, True, False, True, True]


def test_two_models_in_turns_each_have_their_window() -> None:
    accelerator, first, _, batches = make(2, samples=16)
    second = accelerator.prepare(Net(1))
    synced: dict[str, list[bool]] = {"first": [], "second": [], "both": []}
    for _ in batches:
        for name, models in (("first", [first]), ("second", [second]), ("both", [first, second])):
            with accelerator.accumulate(*models):
                synced[name].append(accelerator.sync_gradients)
    assert synced["first"] == synced["second"] == synced["both"] == [False, True] * 2


def test_several_times_within_one_batch() -> None:
    accelerator, model, _, batches = make(2, samples=8)
    synced = []
    for _ in batches:
        for _ in range(3):
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
    # Two windows of two, of which the second is in the last batch, where every block syncs.
    assert synced == [False, True, False, True, True, True]


def test_a_second_accelerator_has_its_own_steps() -> None:
    accelerator, model, optimizer, batches = make(4)
    other = Accelerator(gradient_accumulation_steps=2)
    assert (accelerator.gradient_accumulation_steps, other.gradient_accumulation_steps) == (4, 2)
    assert GradientState().num_steps == 4
    net = Net()
    second, second_optimizer = other.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    synced: list[tuple[bool, bool]] = []
    for x, _ in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
        with other.accumulate(second):
            before = weights(second)
            other.backward(second(x).sum())
            second_optimizer.step()
            assert other.sync_gradients == (not torch.equal(before, weights(second)))
        synced.append((accelerator.sync_gradients, other.sync_gradients))
    assert synced == [(False, False), (False, True), (False, False), (True, True), (True, True)]


def test_the_variable_of_the_launcher_wins() -> None:
    with patch_environment(ACCELERATE_GRADIENT_ACCUMULATION_STEPS=5):
        assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 5
    with patch_environment(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="many"), pytest.raises(ValueError, match="'many'"):
        Accelerator()


@pytest.mark.parametrize("steps", [0, -1])
def test_steps_below_one(steps: int) -> None:
    with pytest.raises(ValueError, match=f"gradient_accumulation_steps is {steps}"):
        Accelerator(gradient_accumulation_steps=steps)


@pytest.mark.parametrize("steps", [2.5, None, "two"])
def test_steps_that_are_no_number_name_the_argument(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"^gradient_accumulation_steps is {steps!r}"):
        Accelerator(gradient_accumulation_steps=steps)


def test_steps_and_a_plugin() -> None:
    with pytest.raises(ValueError, match="not both"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))


def test_steps_can_be_assigned_later() -> None:
    accelerator, model, _, batches = make(1)
    accelerator.gradient_accumulation_steps = 2
    assert walk(accelerator, batches, model) == [False, True, False, True, True]


@pytest.mark.parametrize("adjust", [True, False])
def test_rates_follow_the_steps_of_the_optimizer_whatever_adjust_scheduler_says(adjust: bool) -> None:
    accelerator, model, optimizer, batches = make(2, samples=16, adjust_scheduler=adjust)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: float(step)))
    rates = []
    for x, _ in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
        rates += scheduler.get_last_lr()
    assert rates == [0.0, 0.1, 0.1, 0.2]


def test_an_error_inside_the_block_passes_through() -> None:
    accelerator, model, _, _ = make(2)
    with pytest.raises(KeyError), accelerator.accumulate(model):
        raise KeyError("inside")
    with accelerator.accumulate(model):
        assert accelerator.sync_gradients


def test_accumulate_as_a_decorator() -> None:
    accelerator, model, _, _ = make(2)

    @accelerator.accumulate(model)
    def micro_batch() -> bool:
        return accelerator.sync_gradients

    assert [micro_batch() for _ in range(4)] == [False, True, False, True]
