"""What a script forgot to prepare, or prepared and did not use: said once, at its line, by rank 0."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from tests.harness import run_world
from tests.unit.accelerator.toys import Net, data, loader


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)


@contextmanager
def heard() -> Iterator[list[str]]:
    """The sentences that are said in here, each of this file's own line."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    assert all(warning.filename == __file__ for warning in caught), [str(warning) for warning in caught]
    said += [str(warning.message) for warning in caught]


def train(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any) -> None:
    for _ in range(2):
        for x, _y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()


Script = Callable[[Accelerator], None]


def nothing(accelerator: Accelerator) -> None:
    net = Net()
    train(accelerator, net, sgd(net), loader())


def all_but_the_model(accelerator: Accelerator) -> None:
    net = Net()
    optimizer, batches = accelerator.prepare(sgd(net), loader())
    train(accelerator, net, optimizer, batches)


def results_dropped(accelerator: Accelerator) -> None:
    net, batches = Net(), loader()
    optimizer = sgd(net)
    accelerator.prepare(net, optimizer, batches)
    train(accelerator, net, optimizer, batches)


def model_dropped(accelerator: Accelerator) -> None:
    net = Net()
    _, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
    train(accelerator, net, optimizer, batches)


def all_but_the_loader(accelerator: Accelerator) -> None:
    net = Net()
    model, optimizer = accelerator.prepare(net, sgd(net))
    train(accelerator, model, optimizer, loader())


def loader_dropped(accelerator: Accelerator) -> None:
    set_seed(0)
    net, batches = Net(), loader(shuffle=True, num_workers=1)
    model, optimizer, _ = accelerator.prepare(net, sgd(net), batches)
    train(accelerator, model, optimizer, batches)


def all_but_the_optimizer(accelerator: Accelerator) -> None:
    net = Net()
    model, batches = accelerator.prepare(net, loader())
    train(accelerator, model, sgd(net), batches)


def optimizer_dropped(accelerator: Accelerator) -> None:
    net = Net()
    optimizer = sgd(net)
    model, _, batches = accelerator.prepare(net, optimizer, loader())
    train(accelerator, model, optimizer, batches)


# --- and scripts in which all is well -----------------------------------------------------------------------------


def without_accumulate(accelerator: Accelerator) -> None:
    net = Net()
    model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
    for x, _y in batches:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def prepared(accelerator: Accelerator) -> None:
    net = Net()
    train(accelerator, *accelerator.prepare(net, sgd(net), loader()))


def one_by_one(accelerator: Accelerator) -> None:
    net = Net()
    optimizer = accelerator.prepare(sgd(net))
    batches = accelerator.prepare_data_loader(loader())
    train(accelerator, accelerator.prepare_model(net), optimizer, batches)


def wrapped_by_the_script(accelerator: Accelerator) -> None:
    net = Net()
    model = DistributedDataParallel(net) if accelerator.num_processes > 1 else net
    optimizer, batches = accelerator.prepare(sgd(net), loader())
    train(accelerator, model, optimizer, batches)


def shared_out_by_the_script(accelerator: Accelerator) -> None:
    """Each process has a dataset of its own, of equal length, and reads it by itself."""
    net = Net()
    model, optimizer = accelerator.prepare(net, sgd(net))
    train(accelerator, model, optimizer, DataLoader(data(seed=accelerator.process_index), batch_size=4))


def no_loader(accelerator: Accelerator) -> None:
    """The same batch everywhere, as measurements have it."""
    net = Net()
    model, optimizer = accelerator.prepare(net, sgd(net))
    train(accelerator, model, optimizer, [(torch.ones(2, 4), None)] * 4)


def batches_in_a_list(accelerator: Accelerator) -> None:
    net = Net()
    model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
    train(accelerator, model, optimizer, list(batches))


def two_in_turn(accelerator: Accelerator) -> None:
    """As GANs train: another model and optimizer first."""
    one, two = Net(0), Net(1)
    first, second = sgd(one), sgd(two)
    one, two, first, second, batches = accelerator.prepare(one, two, first, second, loader())
    for x, _y in batches:
        for model, other, optimizer in ((one, two, first), (two, one, second)):
            with accelerator.accumulate(model):
                other(x)
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()


def steps_of_its_own(accelerator: Accelerator) -> None:
    """An optimizer that is not prepared, but waits for the end of each window."""
    net = Net()
    model, batches = accelerator.prepare(net, loader())
    optimizer = sgd(net)
    for x, _y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()


def counted_by_the_script(accelerator: Accelerator) -> None:
    """Windows without `accumulate`."""
    net = Net()
    model, batches = accelerator.prepare(net, loader())
    optimizer = sgd(net)
    for (x, _y), last in zip(batches, itertools.cycle((False, True)), strict=False):
        accelerator.backward(model(x).mean())
        if last:
            optimizer.step()
            optimizer.zero_grad()


def another_beside_it(accelerator: Accelerator) -> None:
    """Something small that the script trains by itself, at every micro-batch."""
    net, own = Net(), Net(3)
    model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
    mine = sgd(own)
    for x, _y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            own(x).mean().backward()
            mine.step()
            mine.zero_grad()
            optimizer.step()
            optimizer.zero_grad()


def another_beside_steps_that_the_script_counts(accelerator: Accelerator) -> None:
    net, own = Net(), Net()
    model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
    mine = sgd(own)
    for number, (x, _y) in enumerate(batches):
        with accelerator.no_sync(model) if number % 2 == 0 else nullcontext():
            accelerator.backward(model(x).mean())
        own(x).mean().backward()
        mine.step()
        mine.zero_grad()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def with_items(accelerator: Accelerator) -> None:
    net = Net()
    model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
    for x, _y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum(), num_items=len(x))
            optimizer.step()
            optimizer.zero_grad()


def _losses(how: str) -> Script:
    """Two losses of one model in each step, with the backwards in the order of `how`."""

    def script(accelerator: Accelerator) -> None:
        net = Net()
        model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
        for x, _y in batches:
            with accelerator.accumulate(model):
                if how == "summed":
                    accelerator.backward(model(x).mean() + model(2 * x).mean())
                elif how == "in turn":
                    accelerator.backward(model(x).mean())
                    accelerator.backward(model(2 * x).mean())
                elif how == "retained":
                    loss = model(x).mean()
                    accelerator.backward(loss, retain_graph=True)
                    accelerator.backward(2 * loss)
                else:
                    first, second = model(x).mean(), model(2 * x).mean()
                    accelerator.backward(first)
                    accelerator.backward(second)
                optimizer.step()
                optimizer.zero_grad()

    script.__name__ = how
    return script


def triggered(accelerator: Accelerator) -> None:
    """No forward makes DDP average: the last backward is told to."""
    net = Net()
    model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
    for x, _y in batches:
        with accelerator.no_sync(model):
            first, second = model(x).mean(), model(2 * x).mean()
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        optimizer.step()
        optimizer.zero_grad()


def two_without_an_exchange(accelerator: Accelerator) -> None:
    net = Net()
    model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
    for x, _y in batches:
        with accelerator.no_sync(model):
            loss = model(x).mean()
            accelerator.backward(loss, retain_graph=True)
            accelerator.backward(loss)
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()


def of_two_models(accelerator: Accelerator) -> None:
    """Both forwards, and then both backwards: each model has one of them."""
    nets = Net(), Net()
    first, second, optimizer, batches = accelerator.prepare(*nets, sgd(*nets), loader())
    for x, _y in batches:
        losses = first(x).mean(), second(x).mean()
        for loss in losses:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


FINE: list[Script] = [
    _losses("summed"),
    _losses("in turn"),
    of_two_models,
    triggered,
    two_without_an_exchange,
    prepared,
    one_by_one,
    wrapped_by_the_script,
    shared_out_by_the_script,
    no_loader,
    batches_in_a_list,
    two_in_turn,
    another_beside_it,
    another_beside_steps_that_the_script_counts,
    with_items,
]
MODEL = r"No model was passed to `accelerator.prepare\(\)`"
UNUSED = "returned was not called"
LOADER = "2 processes .* same loss"
AGAIN = "second backward without a forward of the model in between"
OPTIMIZER = "in the middle of an accumulation window"
ALONE = "steps is 2, but this SGD steps after a single micro-batch"


def sentences(script: Script, steps: int = 1) -> list[str]:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    with heard() as said:
        script(accelerator)
    return said if accelerator.is_main_process else [f"{sentence} (rank 1)" for sentence in said]


def several() -> dict[tuple[str, int], list[str]]:
    forgotten = [nothing, all_but_the_model, results_dropped, model_dropped, all_but_the_loader, loader_dropped]
    again = [_losses("after both forwards"), _losses("retained")]
    found = {(script.__name__, 1): sentences(script) for script in [*forgotten, *again, *FINE]}
    windows = [
        all_but_the_optimizer,
        optimizer_dropped,
        without_accumulate,
        steps_of_its_own,
        counted_by_the_script,
        *FINE,
    ]
    return found | {(script.__name__, 2): sentences(script, 2) for script in windows}


def test_several_processes() -> None:
    first, second = run_world(several, 2)
    expected: dict[tuple[str, int], str] = {
        ("nothing", 1): MODEL,
        ("all_but_the_model", 1): MODEL,
        ("results_dropped", 1): UNUSED,
        ("model_dropped", 1): UNUSED,
        ("all_but_the_loader", 1): LOADER,
        ("loader_dropped", 1): LOADER,
        ("after both forwards", 1): AGAIN,
        ("retained", 1): AGAIN,
        ("all_but_the_optimizer", 2): OPTIMIZER,
        ("optimizer_dropped", 2): OPTIMIZER,
        ("without_accumulate", 2): ALONE,
    }
    for case, said in first.items():
        assert len(said) == (case in expected), (case, said)
        if case in expected:
            with pytest.warns(UserWarning, match=expected[case]):
                warnings.warn(said[0], stacklevel=1)
    assert [case for case, said in second.items() if said] == []


@pytest.mark.parametrize("script", [nothing, all_but_the_optimizer, optimizer_dropped, results_dropped])
def test_an_optimizer_that_steps_at_every_micro_batch_of_one_process(script: Script) -> None:
    (said,) = sentences(script, 2)
    assert OPTIMIZER in said
    assert sentences(script) == []  # without windows all of it is right


@pytest.mark.parametrize("script", [*FINE, steps_of_its_own, counted_by_the_script])
def test_right_scripts_on_one_process_are_silent(script: Script) -> None:
    assert sentences(script, 2) == []
    assert sentences(script) == []


def test_a_second_training_after_one_that_was_freed_in_the_middle_of_a_window() -> None:
    """The first Accelerator is still there, and looks at optimizers; it has nothing left that they could train."""

    def one(stop: int | None) -> Accelerator:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        net = Net()
        model, optimizer, batches = accelerator.prepare(net, sgd(net), loader())
        for number, (x, _y) in enumerate(batches, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if number == stop:
                break
        accelerator.free_memory()
        return accelerator

    with heard() as said:
        kept = [one(stop=1), one(stop=None)]
    assert len(kept) == 2
    assert said == []


def test_a_window_that_a_resume_goes_on_with(tmp_path: Path) -> None:
    for goes_on in (False, True):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        if goes_on:
            accelerator.load_state(tmp_path)
        with heard() as said:
            for _ in range(3):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 4)).mean())
                    optimizer.step()
                    optimizer.zero_grad()
        assert said == []
        accelerator.save_state(tmp_path)


def test_a_window_that_a_script_counts_itself_and_a_resume_goes_on_with(tmp_path: Path) -> None:
    for micro_batches in (range(3), range(3, 8)):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        if micro_batches[0] > 0:
            accelerator.load_state(tmp_path)
        with heard() as said:
            for number in micro_batches:
                accelerator.backward(model(torch.ones(2, 4)).mean())
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
        assert said == []
        accelerator.save_state(tmp_path)


def test_a_step_behind_a_loop_of_one_batch() -> None:
    def script(accelerator: Accelerator) -> None:
        net = Net()
        model, optimizer, loader = accelerator.prepare(net, sgd(net), DataLoader(torch.ones(2, 4), batch_size=2))
        for _ in range(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()

    assert sentences(script, 4) == []


@pytest.mark.parametrize("around", ["each batch", "the loop"])
def test_accumulate_around_the_loop(around: str) -> None:
    def script(accelerator: Accelerator) -> None:
        net = Net()
        model, optimizer, loader = accelerator.prepare(net, sgd(net), DataLoader(torch.ones(24, 4), batch_size=2))
        for _ in range(3):
            with accelerator.accumulate(model) if around == "the loop" else nullcontext():
                for batch in loader:
                    with accelerator.accumulate(model) if around == "each batch" else nullcontext():
                        accelerator.backward(model(batch).mean() / 2)
                        accelerator.backward(model(batch).mean() / 2)
                        optimizer.step()
                        optimizer.zero_grad()

    said = sentences(script, 4)
    assert len(said) == (around == "the loop")
    assert all(sentence.startswith("Two batches were read inside of one `with") for sentence in said)


@pytest.mark.parametrize("early", [False, True])
def test_clipping_within_a_window(early: bool) -> None:
    def script(accelerator: Accelerator) -> None:
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        for _ in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).mean())
                if early or accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    said = sentences(script, 4)
    assert len(said) == early
    assert all(sentence.startswith("Gradients are clipped in the middle") for sentence in said)


def test_clipping_with_parameters_that_were_used_up() -> None:
    def script(accelerator: Accelerator) -> None:
        net = Net()
        model, _ = accelerator.prepare(net, sgd(net))
        parameters = model.parameters()
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            accelerator.clip_grad_norm_(parameters, 1.0)
        accelerator.clip_grad_norm_([], 1.0)  # those that another rank has, say

    (said,) = sentences(script, 1)
    assert said.startswith("Nothing is clipped: these parameters are an iterator")


def test_a_closure_within_a_window() -> None:
    def script(accelerator: Accelerator) -> None:
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).mean()
            accelerator.backward(loss)
            return loss

        for _ in range(8):
            with accelerator.accumulate(model):
                optimizer.step(closure)

    (said,) = sentences(script, 4)
    assert said.startswith("`optimizer.step(closure)` does not call the closure before")


@pytest.mark.parametrize("where", ["before the window", "in the window", "before each backward", "after the step"])
def test_gradients_that_are_cleared_in_a_window(where: str) -> None:
    def script(accelerator: Accelerator) -> None:
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        for number in range(8):
            if where == "in the window" or (where == "before the window" and number % 4 == 0):
                model.zero_grad()
            with accelerator.accumulate(model):
                if where == "before each backward":
                    optimizer.zero_grad()
                accelerator.backward(model(torch.ones(2, 4)).mean())
                optimizer.step()
                if where == "after the step":
                    optimizer.zero_grad()

    said = sentences(script, 4)
    assert len(said) == (where in ("in the window", "before each backward"))
    assert all(sentence.startswith("The gradients of an accumulation window were cleared") for sentence in said)


def test_steps_outside_of_accumulate_on_one_process() -> None:
    (said,) = sentences(without_accumulate, 2)
    assert said.startswith(
        "gradient_accumulation_steps is 2, but this SGD steps after a single micro-batch, whose loss"
    )
    assert sentences(without_accumulate, 1) == []
