"""Training with `even_batches=False`: some ranks run out of batches first, nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from tests.harness import run_world, world_outcomes
from tests.unit.accelerator.toys import Net, assert_same_everywhere, data, loader, optimizer_values, weights

TIMEOUT = 20.0
EPOCHS = 3


class Normed(Net):
    """With buffers, which DDP sends from rank 0 at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Sparing(Net):
    """Uses one of its heads in turn, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 1)
        self.never = nn.Linear(8, 1)
        self.calls = 0
        with torch.no_grad():
            for parameter in (*self.other.parameters(), *self.never.parameters()):
                parameter.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) if self.calls % 2 else self.other(hidden)


def fresh(steps: int = 1, precision: str = "no", handlers: list[Any] | None = None, **config: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(even_batches=False, **config),
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0), *(handlers or [])],
    )


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def by_hand(samples: int, ranks: int, steps: int) -> torch.Tensor:
    """Plain SGD in one process, where a rank without a batch adds nothing to the mean over all ranks."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        batches = list(loader(samples))
        rounds = [batches[start : start + ranks] for start in range(0, len(batches), ranks)]
        for number, round_ in enumerate(rounds, start=1):
            for x, y in round_:
                (loss_of(model, x, y) / ranks / steps).backward()
            if number % steps == 0 or number == len(rounds):
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def train(
    accelerator: Accelerator,
    samples: int,
    net: Any = None,
    kind: Any = torch.optim.SGD,
    *,
    clip: bool = False,
    count: bool = False,
    evaluate: bool = False,
) -> tuple[Any, Any, list[float]]:
    net = net or Net()
    schedule = torch.optim.lr_scheduler.LambdaLR(inner := kind(net.parameters(), lr=0.1), lambda _: 1.0)
    model, optimizer, scheduler, batches = accelerator.prepare(net, inner, schedule, loader(samples))
    held_out = accelerator.prepare(loader(samples + 4)) if evaluate else None
    seen: list[float] = []
    for _ in range(EPOCHS):
        for x, y in batches:
            seen += x[:, 0].tolist()
            with accelerator.accumulate(model):
                if count:
                    accelerator.backward((model(x) - y).square().sum(), num_items=len(x))
                else:
                    accelerator.backward(loss_of(model, x, y))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if held_out is not None:
                _evaluate(accelerator, model, held_out)
        if held_out is not None:
            _evaluate(accelerator, model, held_out)
        assert_same_everywhere(weights(model))
        assert_same_everywhere(optimizer_values(optimizer))
        assert (
            accelerator._communicator.gather_objects(scheduler.state_dict())
            == [scheduler.state_dict()] * accelerator.num_processes
        )
        for buffer in model.buffers():
            assert_same_everywhere(buffer)
    return model, optimizer, seen


def _evaluate(accelerator: Accelerator, model: Any, batches: Any) -> None:
    """An evaluation loop of its own length on each rank; without collectives, so that ranks may differ in it."""
    bare = accelerator.unwrap_model(model)
    bare.eval()
    with torch.no_grad():
        assert sum(len(bare(x)) for x, _ in batches) > 0
    bare.train()


def assert_every_sample_used(accelerator: Accelerator, seen: list[float], samples: int) -> None:
    every = [value for part in accelerator._communicator.gather_objects(seen) for value in part]
    expected = data(samples).tensors[0][:, 0].tolist() * EPOCHS
    assert sorted(every) == sorted(expected)


SIZES = [20, 27, 33]  # 5, 7 and 9 batches


def _like_by_hand() -> None:
    for samples in SIZES:
        for steps in (1, 2, 3):
            accelerator = fresh(steps)
            model, _, seen = train(accelerator, samples)
            expected = by_hand(samples, accelerator.num_processes, steps)
            torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-6, msg=f"{samples} {steps}")
            assert_every_sample_used(accelerator, seen, samples)


@pytest.mark.parametrize("processes", [2, 3])
def test_every_sample_is_used_and_the_math_is_that_of_join(processes: int) -> None:
    run_world(_like_by_hand, processes, timeout=TIMEOUT)


def _variants() -> None:
    adam = torch.optim.AdamW
    samples = 27
    for steps in (1, 2):
        train(fresh(steps), samples, kind=adam, clip=True)
        train(fresh(steps), samples, Normed(), adam)
        train(fresh(steps), samples, kind=adam, count=True, clip=True)
        train(fresh(steps, "fp16"), samples, kind=adam, clip=True)
        train(fresh(steps, "bf16"), samples, kind=adam)
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        train(fresh(steps, handlers=[unused]), samples, Sparing(), adam)
        train(fresh(steps, handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]), samples)
        train(fresh(steps), samples, kind=adam, evaluate=True)


@pytest.mark.parametrize("processes", [2, 3])
def test_precision_clipping_buffers_counts_and_evaluation(processes: int) -> None:
    run_world(_variants, processes, timeout=TIMEOUT)


def _no_batch_at_all() -> None:
    for steps in (1, 2):
        accelerator = fresh(steps)
        model, _, seen = train(accelerator, 6)  # two batches for three ranks
        torch.testing.assert_close(weights(model), by_hand(6, 3, steps), rtol=1e-5, atol=1e-6)
        assert_every_sample_used(accelerator, seen, 6)
        train(fresh(steps), 3, Normed(), torch.optim.AdamW, clip=True)


def test_a_rank_without_a_single_batch() -> None:
    run_world(_no_batch_at_all, 3, timeout=TIMEOUT)


def _split() -> None:
    accelerator = fresh(split_batches=True)
    _, _, seen = train(accelerator, 29)  # the last batch of one sample is all rank 0's
    assert_every_sample_used(accelerator, seen, 29)


def test_split_batches() -> None:
    run_world(_split, 2, timeout=TIMEOUT)


def _like_counting_by_hand() -> None:
    accelerator = fresh(2)
    model, _, _ = train(accelerator, 27, count=True)
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    batches = list(loader(27))
    for _ in range(EPOCHS):
        # Windows of two rounds of two ranks: every window is one big batch.
        for window in (batches[:4], batches[4:]):
            x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
            loss_of(reference, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)


def test_counted_items_make_it_one_big_batch() -> None:
    run_world(_like_counting_by_hand, 2, timeout=TIMEOUT)


def _two_models(order: str) -> None:
    """Two models in one loop, trained by their own backwards or by a common one."""
    accelerator = fresh()
    nets = [Normed(), Net(1, hidden=5)]
    inner = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    *models, one, two, batches = accelerator.prepare(*nets, *inner, loader(27))
    for _ in range(EPOCHS):
        for x, y in batches:
            if order == "together":
                accelerator.backward(loss_of(models[0], x, y) + loss_of(models[1], x, y))
            elif order == "in turns":
                for model in models:
                    accelerator.backward(loss_of(model, x, y))
            elif order == "reversed":
                for model in reversed(models):
                    accelerator.backward(loss_of(model, x, y))
            else:  # one in front of the other, then the second by itself, twice
                accelerator.backward(models[1](x + models[0](x)).square().mean())
                for _ in range(2):
                    accelerator.backward(loss_of(models[1], x, y))
            one.step()
            two.step()
            one.zero_grad()
            two.zero_grad()
        for model, optimizer in zip(models, (one, two), strict=True):
            assert_same_everywhere(weights(model))
            assert_same_everywhere(optimizer_values(optimizer))


@pytest.mark.parametrize("order", ["together", "in turns", "reversed", "mixed"])
def test_two_models_in_one_loop(order: str) -> None:
    run_world(_two_models, 2, order, timeout=TIMEOUT)


def _break_at_the_last_batch() -> None:
    accelerator = fresh()
    net = Net()
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(net, inner, loader(20))
    for _ in range(2):
        for number, (x, y) in enumerate(batches, start=1):
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
            if number == 3:  # rank 0's last batch; rank 1 has two
                break
        assert_same_everywhere(weights(model))


def test_a_break_at_the_last_batch() -> None:
    run_world(_break_at_the_last_batch, 2, timeout=TIMEOUT)


def _frozen_and_unfinished() -> None:
    """Only evaluated models, or a break before the end, ask for no company."""
    accelerator = fresh()
    model, batches = accelerator.prepare(Net(), loader(20))
    model.eval()
    for _ in range(2):
        for x, _ in batches:
            model.module(x)
    model.train()
    with torch.no_grad():
        for x, _ in batches:
            model.module(x)
    for number, (x, y) in enumerate(batches, start=1):
        accelerator.backward(loss_of(model, x, y))
        if number == 2:
            break
    accelerator.wait_for_everyone()


def test_evaluation_alone() -> None:
    run_world(_frozen_and_unfinished, 2, timeout=TIMEOUT)


def _join(even: bool | None) -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator()
    net = Net()
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data(20), batch_size=4)
    )
    seen = 0
    with accelerator.join_uneven_inputs([model], even_batches=even):
        assert batches.batch_sampler.even_batches == (True if even is None else even)
        for x, y in batches:
            seen += 1
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
    assert batches.batch_sampler.even_batches is True
    assert accelerator._communicator.gather_objects(seen) == ([3, 2] if even is False else [3, 3])
    if even is False:
        # Parameters of the one that trained on; torch's Join sends the last rank's to all.
        assert_same_everywhere(weights(model))


def test_join_uneven_inputs() -> None:
    for even in (False, None, True):
        run_world(_join, 2, even, timeout=TIMEOUT)


def test_join_on_one_process_does_nothing() -> None:
    accelerator = Accelerator()
    model, batches = accelerator.prepare(Net(), loader(20))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert len(list(batches)) == 5


def items_without_a_batch_for_everyone() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(4, 1), batch_size=4))
    for batch in loader:
        accelerator.backward(model(batch).sum(), num_items=4)


def test_items_need_a_batch_for_everyone() -> None:
    outcomes = world_outcomes(items_without_a_batch_for_everyone, 2)
    assert outcomes[0].error == "ValueError"
    assert "needs a batch for every process, but this loader has 1 for 2" in outcomes[0].message
