"""What a script may give to `prepare`, and when: blocks to compile, several calls, an optimizer DeepSpeed knows not."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import TorchDynamoPlugin, compile_regions_deepspeed
from tests.deepspeed import training
from tests.harness import run_world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.inner(inputs).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def end(acc: Accelerator) -> None:
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)


def losses(acc: Accelerator, net: Any, optimizer: Any, steps: int = 3) -> list[float]:
    found = []
    inputs, _ = training.data().tensors
    for number in range(steps):
        rows = inputs[8 * number + 4 * acc.process_index :][:4]
        loss = training.loss_of(net(rows), rows.roll(1, 1))
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def prepared(stage: int, plugin: TorchDynamoPlugin | None = None) -> tuple[Accelerator, Any, Any]:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    acc = Accelerator(cpu=True, deepspeed_plugin=training.plugin(stage), dynamo_plugin=plugin)
    net: Any = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.02)
    net, optimizer, _ = acc.prepare(net, optimizer, DataLoader(training.data(), batch_size=4))
    return acc, net, optimizer


def compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    for stage in (2, 3):
        acc, net, optimizer = prepared(stage)
        expected = losses(acc, net, optimizer)
        end(acc)
        acc, net, optimizer = prepared(stage)
        graphs.clear()
        compile_regions_deepspeed(net.module, backend=backend)
        torch.testing.assert_close(losses(acc, net, optimizer), expected)
        assert graphs, "nothing was compiled"
        end(acc)
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        acc, net, optimizer = prepared(stage, plugin)
        assert all(part._compiled_call_impl is not None for part in (net.module.first, *net.module.blocks))
        assert net.module._compiled_call_impl is None
        torch.testing.assert_close(losses(acc, net, optimizer), expected)
        end(acc)


def test_blocks_of_an_engine_are_compiled() -> None:
    run_world(compiled, 2, timeout=120)


class Signs(torch.optim.Optimizer):
    """An optimizer that DeepSpeed does not know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def in_parts() -> None:
    expected = None
    for parts in ("at once", "loaders first", "the scheduler last"):
        acc = training.accelerator(2)
        net: Any = training.model()
        optimizer: Any = Signs(net.parameters())
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader: Any = DataLoader(training.data(), batch_size=4)
        evaluated: Any = DataLoader(training.data(), batch_size=2)
        if parts == "at once":
            schedule, loader, evaluated, optimizer, net = acc.prepare(schedule, loader, evaluated, optimizer, net)
        elif parts == "loaders first":
            loader, evaluated = acc.prepare(loader, evaluated)
            net, optimizer, schedule = acc.prepare(net, optimizer, schedule)
        else:
            net, optimizer, loader, evaluated = acc.prepare(net, optimizer, loader, evaluated)
            schedule = acc.prepare(schedule)
        found = []
        for (inputs, targets), _ in zip(loader, range(3), strict=False):
            loss = training.loss_of(net(inputs), targets)
            acc.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append((loss.item(), schedule.get_last_lr()))
        assert len(list(evaluated)) == 96 // 2 // 2
        expected = expected or found
        assert found == expected, parts
        assert found[0][1] != found[2][1], "the rate has changed"
        end(acc)


def test_calls_in_parts_and_an_unknown_optimizer() -> None:
    run_world(in_parts, 2, timeout=120)


TIMED = {"timers": {"throughput": {"enabled": True}}}
ON_HOST = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("config", "zero", "printed_every", "measured"),
    [
        ({}, {}, None, False),
        (TIMED, {}, None, True),
        ({}, {}, 10, True),
        ({"timers": {"throughput": {"synchronized": False}}}, {}, None, True),
        ({}, ON_HOST, None, True),
    ],
)
def test_speed_is_measured_where_anybody_reads_it(
    config: dict[str, Any], zero: dict[str, Any], printed_every: int | None, measured: bool
) -> None:
    run_world(timer, 1, config, zero, printed_every, measured, timeout=120)


def timer(config: dict[str, Any], zero: dict[str, Any], printed_every: int | None, measured: bool) -> None:
    """DeepSpeed's timer has the host wait for the GPU twice in each step."""
    given = {"zero_optimization": {"stage": 2, **zero}, "train_micro_batch_size_per_gpu": 4, **config}
    plugin = DeepSpeedPlugin(hf_ds_config=given)
    if printed_every is not None:
        plugin.deepspeed_config["steps_per_print"] = printed_every
    before = copy.deepcopy(plugin.deepspeed_config)
    acc = Accelerator(cpu=True, deepspeed_plugin=plugin)
    net: Any = Net()
    net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.02))
    assert net.tput_timer.config.enabled is measured
    assert ("timers" in plugin.deepspeed_config) is ("timers" in before), "the config that a script reads stays"
    losses(acc, net, optimizer, steps=4)
    assert (net.tput_timer.total_elapsed_time > 0) is measured
    end(acc)
