"""Checks when gradients are shared: with `no_sync`, with `accumulate`, and with several forward passes at once.

A copy of the model, trained by hand on the samples of all processes, says what the gradients should be.
`accelerate launch test_sync.py`; with one process, what needs others is left out.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate.accelerator import Accelerator
from accelerate.config.accumulation import GradientAccumulationPlugin
from accelerate.config.data import DataLoaderConfiguration
from accelerate.random import set_seed
from accelerate.state import GradientState
from accelerate.test_utils.checks import expect, expect_equal, needs, run_checks
from accelerate.test_utils.training import RegressionDataset, RegressionModel


def check_model_parameters(model_a: Any, model_b: Any, did_step: bool, iteration: int, **kwargs: Any) -> None:
    """Checks that two models have the same gradients after a step, and different ones before it.

    kwargs: the tolerance of `torch.allclose`, for gradients that should be the same.
    """
    for first, second in zip(model_a.parameters(), model_b.parameters(), strict=True):
        if not first.requires_grad:
            continue
        same = torch.allclose(first.grad, second.grad, **(kwargs if did_step else {}))
        relation = "differ" if did_step else "are the same"
        expect(same == did_step, f"step {iteration}: the gradients {relation}: {first.grad} and {second.grad}")


def step_model(model: Any, input: Any, target: Any, accelerator: Accelerator, do_backward: bool = True) -> None:
    """One forward and backward pass; without `do_backward`, by hand, and not through the accelerator."""
    model.train()
    output = model(input)
    loss = torch.nn.functional.mse_loss(output, target.to(output.device))
    if do_backward:
        accelerator.backward(loss)
    else:
        (loss / accelerator.gradient_accumulation_steps).backward()


def get_training_setup(accelerator: Accelerator, sched: bool = False) -> tuple[Any, ...]:
    """A plain model and a prepared copy, with the loader between or after them, and optimizers and schedulers."""
    set_seed(42)
    model = RegressionModel()
    model.first_batch = False  # or each of many models would print its dtypes
    prepared = copy.deepcopy(model)
    loader = DataLoader(RegressionDataset(length=80), batch_size=16)
    model.to(accelerator.device)
    if not sched:
        return model, *accelerator.prepare(prepared, loader)
    mine, theirs = ([*_optimizer(each)] for each in (model, prepared))
    prepared, *theirs, loader = accelerator.prepare(prepared, *theirs, loader)
    return model, *mine, loader, prepared, *theirs


def _optimizer(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _own(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["x"], batch["y"]


def _of_all(accelerator: Accelerator, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the processes together have of a batch."""
    return _own(accelerator.gather(batch))


def _alternate(accelerator: Accelerator, local: bool) -> None:
    """Every other backward pass is inside `no_sync`, where gradients stay those of the process, if there are others."""
    model, prepared, loader = get_training_setup(accelerator)
    batch = next(iter(loader))
    for iteration in range(4):
        step_model(model, *_of_all(accelerator, batch), accelerator)
        alone = iteration % 2 == 0
        if alone:
            with accelerator.no_sync(prepared):
                step_model(prepared, *_own(batch), accelerator)
        else:
            step_model(prepared, *_own(batch), accelerator)
        check_model_parameters(model, prepared, not (alone and local), iteration)


def test_noop_sync(accelerator: Accelerator) -> None:
    """On one process `no_sync` changes nothing."""
    needs(accelerator.num_processes == 1, "a single process")
    _alternate(accelerator, local=False)


def test_distributed_sync(accelerator: Accelerator) -> None:
    """On several processes gradients stay apart inside `no_sync`, and come together after it."""
    needs(accelerator.num_processes > 1, "several processes")
    _alternate(accelerator, local=True)


def test_distributed_sync_multiple_fwd(accelerator: Accelerator) -> None:
    """After several forward passes inside `no_sync`, the backward pass that is told to brings gradients together."""
    needs(accelerator.num_processes > 1, "several processes")
    model, prepared, loader = get_training_setup(accelerator)
    losses = []
    for batch in itertools.islice(loader, 2):
        step_model(model, *_of_all(accelerator, batch), accelerator)
        with accelerator.no_sync(prepared):
            output = prepared(batch["x"])
            losses.append(torch.nn.functional.mse_loss(output, batch["y"].to(output.device)))
    *before, last = losses
    for iteration, loss in enumerate(before):
        accelerator.backward(loss)
        check_model_parameters(model, prepared, False, iteration)
    with accelerator.trigger_sync_in_backward(prepared):
        accelerator.backward(last)
    check_model_parameters(model, prepared, True, len(before))


def _accumulating(split_batches: bool, dispatch_batches: bool, sync_each_batch: bool) -> Accelerator:
    GradientState._reset_state()
    return Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=split_batches, dispatch_batches=dispatch_batches),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch),
    )


def test_gradient_accumulation(
    split_batches: bool = False, dispatch_batches: bool = False, sync_each_batch: bool = False
) -> None:
    """Inside `accumulate`, gradients come together every second time, and at the end of the data."""
    accelerator = _accumulating(split_batches, dispatch_batches, sync_each_batch)
    needs(accelerator.num_processes > 1, "several processes")
    model, prepared, loader = get_training_setup(accelerator)
    for iteration, batch in enumerate(loader):
        step_model(model, *_of_all(accelerator, batch), accelerator, do_backward=False)
        with accelerator.accumulate(prepared):
            step_model(prepared, *_own(batch), accelerator)
        together = iteration % 2 == 1 or iteration == len(loader) - 1
        check_model_parameters(model, prepared, together or sync_each_batch, iteration)
    GradientState._reset_state()


def test_gradient_accumulation_with_opt_and_scheduler(
    split_batches: bool = False, dispatch_batches: bool = False, sync_each_batch: bool = False
) -> None:
    """Optimizer and scheduler wait for the gradients; the scheduler then takes a step for each process."""
    accelerator = _accumulating(split_batches, dispatch_batches, sync_each_batch)
    setup = get_training_setup(accelerator, sched=True)
    model, optimizer, scheduler, loader, prepared, prepared_optimizer, prepared_scheduler = setup
    for iteration, batch in enumerate(loader):
        step_model(model, *_of_all(accelerator, batch), accelerator, do_backward=False)
        together = iteration % 2 == 1 or iteration == len(loader) - 1
        if together:
            optimizer.step()
            for _ in range(1 if split_batches else accelerator.num_processes):
                scheduler.step()
        with accelerator.accumulate(prepared):
            step_model(prepared, *_own(batch), accelerator)
            prepared_optimizer.step()
            prepared_scheduler.step()
        rate, wanted = (each.param_groups[0]["lr"] for each in (prepared_optimizer, optimizer))
        expect_equal(rate, wanted, f"step {iteration}: the learning rate")
        if accelerator.num_processes > 1:
            check_model_parameters(model, prepared, together or sync_each_batch, iteration, rtol=1e-2)
        if together:
            optimizer.zero_grad()
            for mine, theirs in zip(prepared.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
        prepared_optimizer.zero_grad()
    GradientState._reset_state()


def test_dataloader_break() -> None:
    """The loader in use is known, also inside the loop over another one, and so is its last batch."""
    accelerator = Accelerator()
    state = accelerator.gradient_state
    lengths = (80, 96)
    outer, inner = accelerator.prepare(*(DataLoader(RegressionDataset(length=each), batch_size=16) for each in lengths))

    def look(loader: Any, number: int) -> None:
        expect(state.active_dataloader is loader, f"batch {number}: another loader counts as the one in use")
        last = number == len(loader) - 1
        expect_equal(bool(state.end_of_dataloader), last, f"batch {number} of {len(loader)}: the last one")

    for number, _ in enumerate(outer):
        look(outer, number)
        if number == 1:
            for inside, _ in enumerate(inner):
                look(inner, inside)
            look(outer, number)
    expect(state.active_dataloader is None, "a loader counts as in use after its end")


def main() -> None:
    """Runs all checks, those of accumulation in every combination of settings."""
    accelerator = Accelerator()
    run_checks(test_dataloader_break)
    run_checks(test_noop_sync, test_distributed_sync, test_distributed_sync_multiple_fwd, given=(accelerator,))
    names = ("split_batches", "dispatch_batches", "sync_each_batch")
    for values in itertools.product((False, True), repeat=3):
        settings = dict(zip(names, values, strict=True))
        run_checks(
            functools.partial(test_gradient_accumulation, **settings),
            functools.partial(test_gradient_accumulation_with_opt_and_scheduler, **settings),
        )
    accelerator.end_training()


def _mp_fn(index: int) -> None:
    """What torch_xla's launcher calls on each process."""
    main()


if __name__ == "__main__":
    main()
