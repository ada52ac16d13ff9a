"""One loop, one set of checks, for every way to spread a model and every precision."""

from __future__ import annotations

import copy
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.strategies import STRATEGIES, StrategyRow
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs
from tests.harness import WorldFailed, run_world
from tests.unit.accelerator.toys import ALONE, Net, assert_same_everywhere, loader, optimizer_values, weights

SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
# An engine that takes everything over: its file, and this line.
STRATEGIES.insert(0, StrategyRow("tests.contract.toy_engine", "Toy", lambda state: "TOY" in os.environ))
TOY: dict[str, str | None] = {"TOY": "1"}
WORLDS: dict[str, tuple[int, dict[str, str | None]]] = {
    "single": (1, ALONE),
    "launched-1": (1, {}),
    "ddp-2": (2, {}),
    "fsdp2-2": (2, SHARDED),
    "fsdp1-2": (2, SHARDED | {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "true"}),
    "toy-1": (1, ALONE | TOY),
    "toy-2": (2, TOY),
}
PRECISIONS = ["no", "bf16", "fp16"]
CHECKS: dict[str, Callable[[str], None]] = {}


def check(function: Callable[[str], None]) -> Callable[[str], None]:
    CHECKS[function.__name__] = function
    return function


@pytest.fixture(scope="module", params=itertools.product(WORLDS, PRECISIONS), ids="-".join)
def outcomes(request: pytest.FixtureRequest) -> dict[str, Exception | None]:
    """What became of each check. All run in one world; after one that fails, the others go on in a new one."""
    world, precision = request.param
    processes, env = WORLDS[world]
    found: dict[str, Exception | None] = {}
    while left := [name for name in CHECKS if name not in found]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_world(_run, processes, precision, left, env=env, cwd=folder)
            except WorldFailed as failure:
                done = min(len(_passed(folder, rank)) for rank in range(processes))
                if done == len(left):
                    raise  # after the last check
                found |= {**dict.fromkeys(left[:done]), left[done]: failure}
            else:
                found |= dict.fromkeys(left)
    return found


def _run(precision: str, names: list[str]) -> None:
    for name in names:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        CHECKS[name](precision)
        with open(f"passed-{os.environ.get('RANK', 0)}", "a") as file:
            file.write(f"{name}\n")


def _passed(folder: str, rank: int) -> list[str]:
    path = Path(folder, f"passed-{rank}")
    return path.read_text().splitlines() if path.exists() else []


def _sharded() -> bool:
    return "ACCELERATE_USE_FSDP" in os.environ


def _owns_precision() -> bool:
    """Whether the engine casts by itself, in its wrapper, and nothing does outside of it."""
    return "TOY" in os.environ


def _accelerator(precision: str, **kwargs: Any) -> Accelerator:
    # A scale at which the gradients of these losses do not overflow.
    return Accelerator(mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=256.0)], **kwargs)


def _adam(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@check
def trains(precision: str) -> None:
    accelerator = _accelerator(precision)
    plain = Net()
    model, optimizer, batches = accelerator.prepare(plain, _adam(plain), loader())
    before, losses = weights(model), []
    for _ in range(3):
        for x, y in batches:
            out = model(x)
            assert out.dtype is torch.float32
            loss = nn.functional.mse_loss(out, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            assert not optimizer.step_was_skipped
    assert torch.isfinite(torch.stack(losses)).all()
    assert sum(losses[-4:]) < sum(losses[:4])
    assert not torch.equal(weights(model), before)
    assert_same_everywhere(weights(model))
    if os.environ.get("FSDP_VERSION") != "1":  # where a process has a state only for what it holds
        assert_same_everywhere(optimizer_values(optimizer))
    assert all(p.dtype is torch.float32 for p in model.parameters())


@check
def unwraps(precision: str) -> None:
    accelerator = _accelerator(precision)
    x = torch.randn(3, 4)
    expected = Net()(x)
    model = accelerator.prepare(Net())
    everything = accelerator.get_state_dict(model)
    # Sharded weights are put together on the first process alone.
    assert set(everything) == set(Net().state_dict()) or (_sharded() and not accelerator.is_main_process)
    assert set(accelerator.unwrap_model(model).state_dict()) == set(Net().state_dict())

    kept = accelerator.unwrap_model(model)
    assert isinstance(kept, Net)
    if kept is not model and _sharded():
        return  # the parameters are gathered by the wrapper, so nothing runs without it
    # The wrapper still computes in low precision, and hands out fp32.
    assert kept(x).dtype is torch.float32
    assert torch.equal(kept(x), expected) == (precision == "no" or _owns_precision())

    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare is kept
    assert bare.forward.__func__ is Net.forward
    assert "forward" not in vars(bare) and "_original_forward" not in vars(bare)
    if not _sharded():  # there the parameters themselves are gathered in low precision
        torch.testing.assert_close(bare(x), expected, rtol=0, atol=1e-6)


@check
def deep_copies_use_their_own_weights(precision: str) -> None:
    if _sharded():
        return  # torch refuses to copy a sharded model
    accelerator = _accelerator(precision)
    model = accelerator.prepare(Net())
    twin = copy.deepcopy(accelerator.unwrap_model(model))
    x = torch.randn(3, 4)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), torch.zeros(3, 1))
    assert twin(x).dtype is torch.float32
    assert model(x).abs().sum() > 0


@check
def keeps_optimizer_state(precision: str) -> None:
    accelerator = _accelerator(precision)
    plain = Net()
    inner = _adam(plain)
    nn.functional.mse_loss(plain(torch.ones(2, 4)), torch.ones(2, 1)).backward()
    inner.step()
    before = torch.cat([v.flatten() for values in inner.state.values() for v in values.values()])
    model, optimizer = accelerator.prepare(plain, inner)
    assert torch.equal(optimizer_values(optimizer), before)
    # The optimizer still trains the parameters of the prepared model.
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert mine == {id(p) for p in model.parameters()}
    state = optimizer.state_dict()
    other = accelerator.prepare(_adam(Net()))
    other.load_state_dict(state)
    assert torch.equal(optimizer_values(other), before)


def _lr_after(accelerator: Accelerator, iterations: int) -> float:
    """Learning rate (= number of scheduler steps) after some optimizer steps."""
    plain = Net()
    inner = torch.optim.SGD(plain.parameters(), lr=1.0)
    scheduler = LambdaLR(inner, lambda step: float(step))
    model, optimizer, scheduler = accelerator.prepare(plain, inner, scheduler)
    for _ in range(iterations):
        accelerator.backward(model(torch.ones(2, 4)).sum() * 1e-3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    (rate,) = scheduler.get_last_lr()
    return float(rate)


@check
def scheduler_follows(precision: str) -> None:
    processes = PartialState().num_processes
    assert _lr_after(_accelerator(precision), 3) == 3 * processes
    GradientState._reset_state()
    split = DataLoaderConfiguration(split_batches=True)
    assert _lr_after(_accelerator(precision, dataloader_config=split), 3) == 3
    GradientState._reset_state()
    assert _lr_after(_accelerator(precision, step_scheduler_with_optimizer=False), 3) == 3


@check
def prepares_in_any_order_and_number(precision: str) -> None:
    accelerator = _accelerator(precision)
    first, second = Net(0), Net(1)
    one, two = _adam(first), _adam(second)
    schedule_one, schedule_two = LambdaLR(one, lambda _: 1.0), LambdaLR(two, lambda _: 1.0)
    marker = object()
    got = accelerator.prepare(
        schedule_two, two, None, loader(), second, "text", one, marker, first, schedule_one, {"a": 1}
    )
    assert [type(item) for item in got if isinstance(item, (AcceleratedOptimizer, AcceleratedScheduler))] == [
        AcceleratedScheduler,
        AcceleratedOptimizer,
        AcceleratedOptimizer,
        AcceleratedScheduler,
    ]
    assert got[2] is None and got[5] == "text" and got[7] is marker and got[10] == {"a": 1}
    assert got[0].optimizers == [got[1]] and got[9].optimizers == [got[6]]
    assert accelerator.unwrap_model(got[4]) is second and accelerator.unwrap_model(got[8]) is first
    assert accelerator._models == [got[4], got[8]]
    assert accelerator.prepare(None) is None
    assert accelerator.prepare() == ()

    # Twice: nothing is wrapped or listed again.
    again = accelerator.prepare(got[4], got[1], got[0])
    assert again[0] is got[4] and again[1] is got[1] and again[2] is got[0]
    assert len(accelerator._models) == len(accelerator._optimizers) == len(accelerator._schedulers) == 2

    for model, optimizer in ((got[4], got[1]), (got[8], got[6])):
        before = weights(model)
        accelerator.backward(model(torch.ones(2, 4) + accelerator.process_index).sum())
        optimizer.step()
        assert not torch.equal(weights(model), before)
        assert_same_everywhere(weights(model))


@check
def leaves_evaluation_models_alone(precision: str) -> None:
    accelerator = _accelerator(precision)
    evaluated = accelerator.prepare_model(Net(), evaluation_mode=True)
    frozen = Net()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    frozen = accelerator.prepare(frozen)
    assert type(evaluated) is Net and isinstance(accelerator.unwrap_model(frozen), Net)
    for model in (evaluated, frozen):
        assert model(torch.ones(1, 4)).dtype is torch.float32
        in_full = precision == "no" or (_owns_precision() and model is evaluated)
        assert torch.equal(model(torch.ones(1, 4)), Net()(torch.ones(1, 4))) == in_full


@check
def places_what_it_is_told(precision: str) -> None:
    if _sharded():
        return  # the engine places its pieces, whatever it is told
    accelerator = _accelerator(precision)
    plain = Net()
    moved: list[Any] = []
    plain._apply = lambda *args, **kwargs: moved.append(args) or plain  # type: ignore[method-assign,assignment]
    accelerator.prepare(plain, _adam(plain), device_placement=[False, None])
    assert moved == []
    other = Net(1)
    other._apply = lambda *args, **kwargs: moved.append(args) or other  # type: ignore[method-assign,assignment]
    accelerator.prepare(_adam(other), other, device_placement=[None, True])
    assert len(moved) == 1
    with pytest.raises(ValueError, match="device_placement has 1 entries for 2 objects"):
        accelerator.prepare(Net(), Net(), device_placement=[True])


@check
def lets_go_of_everything(precision: str) -> None:
    accelerator = _accelerator(precision, gradient_accumulation_steps=3)
    for release in (accelerator.free_memory, accelerator.clear):
        plain = Net()
        inner = _adam(plain)
        model, optimizer, _scheduler, _batches = accelerator.prepare(
            plain, inner, LambdaLR(inner, lambda _: 1.0), loader()
        )
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 4)).sum())
        model, optimizer = release(model, optimizer)
        assert model is None and optimizer is None
        assert not accelerator._models and not accelerator._optimizers
        assert not accelerator._schedulers and not accelerator._dataloaders
    # A new model starts a new window.
    model = accelerator.prepare(Net())
    synced = []
    for _ in range(3):
        with accelerator.accumulate(model):
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, True]


@check
def accumulates(precision: str) -> None:
    accelerator = _accelerator(precision, gradient_accumulation_steps=3)
    plain = Net()
    inner = _adam(plain)
    rates = LambdaLR(inner, lambda step: float(step + 1))
    model, optimizer, scheduler, batches = accelerator.prepare(
        plain, inner, rates, loader(32 * accelerator.num_processes)
    )
    changed = []
    for x, y in batches:
        with accelerator.accumulate(model):
            before = weights(model)
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            changed.append(not torch.equal(weights(model), before))
            assert changed[-1] == accelerator.sync_gradients
    assert changed == [False, False, True] * 2 + [False, True]
    assert scheduler.get_last_lr() == [0.05 * (3 * accelerator.num_processes + 1)]
    assert_same_everywhere(weights(model))


@check
def autocasts_outside_the_model(precision: str) -> None:
    accelerator = _accelerator(precision)
    with accelerator.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    ours = "no" if _owns_precision() else precision
    assert product.dtype is {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[ours]
    assert (accelerator.scaler is not None) == (ours == "fp16")
    assert accelerator.native_amp == (ours != "no")
    assert accelerator.mixed_precision == precision


@pytest.mark.parametrize("name", CHECKS)
def test_contract(outcomes: dict[str, Exception | None], name: str) -> None:
    if (failure := outcomes[name]) is not None:
        raise failure
