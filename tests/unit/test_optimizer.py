"""The prepared optimizer: when it steps, what it knows, and that it stays an optimizer."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.engines.wrappers import OptimizerOfEngine
from accelerate.optimizer import AcceleratedOptimizer, move_to_device
from accelerate.utils import GradScalerKwargs
from tests.unit.accelerator.toys import Net, weights

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make(
    precision: str = "no", steps: int = 1, scale: float = 256.0, kind: Any = torch.optim.SGD, **kwargs: Any
) -> Any:
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
        kwargs_handlers=[GradScalerKwargs(init_scale=scale)],
    )
    model = Net()
    return accelerator, *accelerator.prepare(model, kind(model.parameters(), **{"lr": 0.1} | kwargs))


def step(accelerator: Accelerator, model: Any, optimizer: Any, factor: float = 1.0) -> None:
    accelerator.backward(model(X).sum() * factor)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_it_pickles(precision: str) -> None:
    accelerator, model, optimizer = make(precision, kind=torch.optim.AdamW)
    step(accelerator, model, optimizer)
    other = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(other, AcceleratedOptimizer)
    assert type(other.optimizer) is torch.optim.AdamW
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    values = zip(other.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in values)
    other.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_one_that_was_pickled_still_leaves_steps_out(fused: bool) -> None:
    accelerator = Accelerator(cpu=True, nonfinite="skip")
    net = Net()
    _, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, fused=fused))
    other_net, other = pickle.loads(pickle.dumps((net, optimizer)))
    before = weights(other_net)
    for value, skipped in ((float("nan"), True), (1.0, False)):
        for parameter in other_net.parameters():
            parameter.grad = torch.full_like(parameter, value)
        other.step()
        assert other.step_was_skipped is skipped and torch.equal(weights(other_net), before) is skipped


class OfEngine(OptimizerOfEngine):
    skipped_attribute = "overflow"


def test_one_of_an_engine_that_was_pickled_is_still_stepped_by_the_engine() -> None:
    net = Net()
    Accelerator(cpu=True)
    other_net, other = pickle.loads(pickle.dumps((net, OfEngine(torch.optim.SGD(net.parameters(), lr=0.1)))))
    before = weights(other_net)
    for parameter in other_net.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()
    other.zero_grad()
    assert torch.equal(weights(other_net), before)
    assert all(parameter.grad is not None for parameter in other_net.parameters())
    other.optimizer.overflow = True
    assert other.step_was_skipped


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_it_can_be_deep_copied_and_the_copy_steps(precision: str) -> None:
    accelerator, model, optimizer = make(precision)
    twin_model, twin = copy.deepcopy((model, optimizer))
    accelerator.backward(twin_model(X).sum())
    before = weights(model), weights(twin_model)
    twin.step()
    assert torch.equal(weights(model), before[0])
    assert not torch.equal(weights(twin_model), before[1])


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("inner", [False, True])
def test_schedulers_can_be_built_on_it(precision: str, inner: bool) -> None:
    accelerator, model, optimizer = make(precision)
    built_on = optimizer.optimizer if inner else optimizer
    with silent():
        scheduler = torch.optim.lr_scheduler.StepLR(built_on, step_size=1, gamma=0.5)
        scheduler = accelerator.prepare(scheduler)
        step(accelerator, model, optimizer)
        scheduler.step()
    assert scheduler.optimizers == [optimizer]
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_state_dict_round_trip() -> None:
    accelerator, model, optimizer = make(kind=torch.optim.Adam)
    step(accelerator, model, optimizer)
    state = optimizer.state_dict()
    other = accelerator.prepare(torch.optim.Adam(Net().parameters(), lr=7.0))
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1
    assert str(other.state_dict()) == str(state)


def test_hooks_and_groups_are_those_of_the_wrapped_optimizer() -> None:
    accelerator, model, optimizer = make()
    calls: list[str] = []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    step(accelerator, model, optimizer)
    assert calls == ["pre", "post"]
    handle.remove()
    step(accelerator, model, optimizer)
    assert calls == ["pre", "post", "pre"]

    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    assert len(optimizer.param_groups) == len(optimizer.optimizer.param_groups) == 2
    extra.sum().backward()
    optimizer.step()
    assert torch.equal(extra.data, torch.zeros(2))
    optimizer.param_groups = optimizer.param_groups[:1]
    assert len(optimizer.optimizer.param_groups) == 1
    optimizer.defaults = {"lr": 3.0}
    assert optimizer.optimizer.defaults == {"lr": 3.0}
    optimizer.state = {}
    assert optimizer.optimizer.state == {}


def test_attributes_of_other_optimizers_are_reached() -> None:
    class Odd(torch.optim.SGD):
        mode = "none"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    accelerator, _model, optimizer = make(kind=Odd)
    optimizer.train()
    assert optimizer.mode == "train"
    optimizer.eval()
    assert optimizer.optimizer.mode == "eval"
    plain = accelerator.prepare(torch.optim.SGD(Net().parameters(), lr=0.1))
    assert plain.train() is None and plain.eval() is None
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_thing


def test_closures() -> None:
    accelerator, model, optimizer = make(kind=torch.optim.LBFGS, max_iter=4)
    reference = Net()
    plain = torch.optim.LBFGS(reference.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum()
        accelerator.backward(loss)
        return loss

    def plain_closure() -> torch.Tensor:
        plain.zero_grad()
        loss = reference(X).square().sum()
        loss.backward()
        return loss

    with silent():
        for _ in range(3):
            value, expected = optimizer.step(closure), plain.step(plain_closure)
            assert value == expected
    assert torch.equal(weights(model), weights(reference))


@pytest.mark.parametrize(("argument", "is_none"), [(None, True), (True, True), (False, False)])
def test_zero_grad(argument: bool | None, is_none: bool) -> None:
    accelerator, model, optimizer = make()
    accelerator.backward(model(X).sum())
    optimizer.zero_grad(argument)
    gradient = model.first.weight.grad
    assert gradient is None if is_none else torch.equal(gradient, torch.zeros_like(gradient))


def test_zero_grad_of_an_optimizer_that_takes_no_argument() -> None:
    class Old(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad(set_to_none=True)

    accelerator, model, optimizer = make(kind=Old)
    accelerator.backward(model(X).sum())
    with pytest.raises(ValueError, match=r"Old\.zero_grad takes no `set_to_none`"):
        optimizer.zero_grad(set_to_none=True)
    optimizer.zero_grad()
    assert model.first.weight.grad is None


def test_move_to_device() -> None:
    moved = move_to_device({"a": torch.ones(1), "b": [torch.ones(2), 3]}, torch.device("meta"))
    assert moved["a"].is_meta and moved["b"][0].is_meta and moved["b"][1] == 3


# --- skipped steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_with_infinite_gradients_is_skipped_and_known(fused: bool) -> None:
    accelerator, model, optimizer = make("fp16", kind=torch.optim.AdamW, fused=fused)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda s: 1.0 + s))
    pattern = [1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0]
    seen = []
    for factor in pattern:
        before, rate = weights(model), scheduler.get_last_lr()
        step(accelerator, model, optimizer, factor)
        skipped = optimizer.step_was_skipped
        assert accelerator.optimizer_step_was_skipped == skipped
        assert torch.equal(weights(model), before) == skipped
        scheduler.step()
        assert (scheduler.get_last_lr() == rate) == skipped
        seen.append(skipped)
    assert seen == [False, True, False, False, True, False]
    assert accelerator.scaler.get_scale() == 256.0 / 4
    assert torch.isfinite(weights(model)).all()


def test_full_precision_never_skips() -> None:
    accelerator, model, optimizer = make()
    step(accelerator, model, optimizer, float("inf"))
    assert not optimizer.step_was_skipped and not accelerator.optimizer_step_was_skipped


def test_scaler_arguments_arrive() -> None:
    handler = GradScalerKwargs(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[handler])
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4))
    scales = []
    for factor in (1.0, 1.0, float("inf"), 1.0):
        step(accelerator, model, optimizer, factor)
        scales.append(accelerator.scaler.get_scale())
    assert scales == [8.0, 32.0, 8.0, 8.0]


def test_a_disabled_scaler_scales_nothing() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = weights(model)
    with silent():
        accelerator.backward(model(X).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert not torch.equal(weights(model), before)
    assert not optimizer.step_was_skipped


def _two_by_hand(rounds: list[tuple[float, float]], clip: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    first, second = Net(0), Net(1)
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (first, second))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for a, b in rounds:
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = first(X), second(X)
        scaler.scale(outputs[0].float().sum() * a).backward()
        scaler.scale(outputs[1].float().sum() * b).backward()
        for model, optimizer in ((first, one), (second, two)):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(one)
        scaler.step(two)
        scaler.update()
        one.zero_grad()
        two.zero_grad()
    return weights(first), weights(second), scaler.get_scale()


@pytest.mark.parametrize("interleaved", [False, True])
def test_two_optimizers_with_clipping_under_one_scaler(interleaved: bool) -> None:
    rounds = [(1.0, 2.0), (float("inf"), 1.0), (3.0, 1.0), (1.0, float("inf")), (0.5, 0.5)]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    nets = Net(0), Net(1)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in nets]
    first, second, one, two = accelerator.prepare(*nets, *sgd)
    pairs = [(first, one), (second, two)]
    for round_ in rounds:
        for (model, _), factor in zip(pairs, round_, strict=True):
            accelerator.backward(model(X).sum() * factor)
        if interleaved:
            for model, optimizer in pairs:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        else:
            for model, _ in pairs:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            for _, optimizer in pairs:
                optimizer.step()
        assert [optimizer.step_was_skipped for _, optimizer in pairs] == [f == float("inf") for f in round_]
        one.zero_grad()
        two.zero_grad()
    expected = _two_by_hand(rounds, 0.5)
    torch.testing.assert_close(weights(first), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights(second), expected[1], rtol=1e-5, atol=1e-6)
    assert accelerator.scaler.get_scale() == expected[2]


def test_unscale_gradients() -> None:
    accelerator, model, optimizer = make("fp16")
    unused = accelerator.prepare(torch.optim.SGD(Net(3).parameters(), lr=0.1))
    accelerator.backward(model(X).sum())
    scaled = model.first.weight.grad.clone()
    for target in (None, optimizer, [optimizer, unused], (optimizer.optimizer,)):
        accelerator.unscale_gradients(target)
        torch.testing.assert_close(model.first.weight.grad * 256.0, scaled)
    before = weights(model)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    torch.testing.assert_close(weights(model), before - 0.1 * gradient)


def test_clip_grad_value_unscales_first() -> None:
    accelerator, model, optimizer = make("fp16")
    accelerator.backward(model(X).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    accelerator.clip_grad_value_(model.first.weight, 0.005)
    assert model.first.weight.grad.abs().max() <= 0.005
    assert model.last.weight.grad.abs().max() == 0.01
    before = weights(model)
    optimizer.step()
    assert (weights(model) - before).abs().max() <= 0.1 * 0.01 + 1e-7


def test_clip_grad_norm_returns_the_norm_before() -> None:
    accelerator, model, _optimizer = make()
    accelerator.backward(model(X).sum())
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected.norm())
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(clipped.norm(), torch.tensor(1e-3), rtol=1e-3, atol=0)
    torch.testing.assert_close(
        accelerator.clip_grad_norm_(iter([model.first.weight]), 1.0, norm_type=float("inf")),
        model.first.weight.grad.abs().max(),
    )


# --- warnings ---------------------------------------------------------------------------------------------------


def test_a_direct_backward_under_accumulation_is_said_once() -> None:
    accelerator, model, optimizer = make(steps=2)

    def window() -> None:
        for _ in range(2):
            with accelerator.accumulate(model):
                model(X).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="divided by the 2 accumulation steps") as caught:
        window()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with silent():
        window()


def test_a_direct_backward_without_accumulation_is_fine() -> None:
    _, model, optimizer = make()
    with silent():
        model(X).sum().backward()
        optimizer.step()


def test_a_direct_backward_under_fp16() -> None:
    accelerator, model, optimizer = make("fp16")
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"call `accelerator.backward\(loss\)`"):
        optimizer.step()
    accelerator, model, optimizer = make("fp16")
    with silent():
        step(accelerator, model, optimizer)
    model(X).sum().backward()
    with pytest.warns(UserWarning, match="scaled for fp16"):
        optimizer.step()


def test_an_optimizer_of_another_model() -> None:
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(Net(), torch.optim.SGD(Net().parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"None of the 4 parameters of this SGD") as caught:
        step(accelerator, model, optimizer)
    assert len(caught) == 1
    with silent():
        step(accelerator, model, optimizer)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("steps", [1, 2])
def test_correct_loops_are_silent(precision: str, steps: int) -> None:
    accelerator, model, optimizer = make(precision, steps)
    other = Net(2)
    partly = accelerator.prepare(torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1))
    with silent():
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(X).sum())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                partly.step()
                optimizer.zero_grad()


def test_an_optimizer_prepared_before_its_model_is_silent() -> None:
    accelerator = Accelerator()
    net = Net()
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    with silent():
        model = accelerator.prepare(net)
        step(accelerator, model, optimizer)


def test_an_optimizer_without_any_model_on_one_process_is_silent() -> None:
    accelerator = Accelerator()
    net = Net()
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    with silent():
        step(accelerator, net, optimizer)
