"""Objects of DeepSpeed and Megatron-LM as scripts see them, around stand-ins for theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from accelerate.utils.megatron_lm import MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper


class Engine:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.calls.append(is_boundary)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        self.calls.append(("backward", loss, kwargs))

    def step(self) -> None:
        self.calls.append("step")

    def get_global_grad_norm(self) -> torch.Tensor:
        return torch.tensor(2.0)


def test_the_last_backward_of_a_window_steps() -> None:
    engine = Engine()
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.backward(1, sync_gradients=False)
    wrapper.backward(2, retain_graph=True)
    assert engine.calls == [
        False,
        ("backward", 1, {}),
        True,
        ("backward", 2, {"retain_graph": True}),
        "step",
    ]
    assert wrapper.get_global_grad_norm() == 2.0


def test_what_the_engine_has_done_is_not_done_again() -> None:
    Accelerator(cpu=True)
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer: Any = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for make, follow, mark in (
        (DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper, "overflow"),
        (MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper, "skipped_iter"),
    ):
        wrapped = make(optimizer)
        wrapped.step()
        wrapped.zero_grad()
        follow(schedule, wrapped).step()
        assert (parameter.item(), parameter.grad.item(), schedule.get_last_lr()) == (1.0, 1.0, [1.0])
        assert not wrapped.step_was_skipped
        setattr(optimizer, mark, True)
        assert wrapped.step_was_skipped
