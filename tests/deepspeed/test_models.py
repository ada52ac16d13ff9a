"""Several models with plugins of their own; models in pieces from the start; whole weights of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from tests.deepspeed import training
from tests.harness import run_world


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) + inputs


def teacher_and_student(folder: str) -> None:
    """A teacher in pieces that is not trained, two students that are, each with an engine of its own."""
    plugins = {"student": training.plugin(2), "teacher": training.plugin(3)}
    acc = Accelerator(cpu=True, deepspeed_plugins=plugins)
    assert acc.deepspeed_plugin is plugins["student"] is acc.state.get_deepspeed_plugin("student")
    first, second = training.model(1), training.model(2)
    optimizers: list[Any] = [torch.optim.AdamW(net.parameters(), lr=0.02, eps=0.1) for net in (first, second)]
    loader: Any = DataLoader(training.data(), batch_size=4)
    first, second, *optimizers, loader = acc.prepare(first, second, *optimizers, loader)
    acc.state.select_deepspeed_plugin("teacher")
    teacher = acc.prepare(training.model(3))
    assert acc.deepspeed_plugin is plugins["teacher"]
    assert teacher.zero_optimization_stage() == 3
    assert first.zero_optimization_stage() == second.zero_optimization_stage() == 2
    for number, (inputs, _) in enumerate(loader):
        with torch.no_grad():
            wanted = teacher(inputs)
        losses = [training.loss_of(net(inputs), wanted) for net in (first, second)]
        if number % 2:
            for loss in losses:
                acc.backward(loss)
        else:
            acc.backward(losses[0] + losses[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = [training.weights(acc, net) for net in (first, second)]
    acc.save_state(folder)
    acc.load_state(folder)
    torch.testing.assert_close([training.weights(acc, net) for net in (first, second)], found, rtol=0, atol=0)
    if acc.is_main_process:
        names = {path.name for path in Path(folder).iterdir()}
        assert {"pytorch_model", "pytorch_model_1", "model_2.safetensors"} <= names
    acc.free_memory()
    acc.state._reset_state()

    acc = training.accelerator(None)
    plain = training.model(3)
    loader = acc.prepare(DataLoader(training.data(), batch_size=4))
    expected = []
    for seed in (1, 2):
        net: Any = training.model(seed)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.02, eps=0.1)
        net, optimizer = acc.prepare(net, optimizer)
        for inputs, _ in loader:
            acc.backward(training.loss_of(net(inputs), plain(inputs).detach()))
            optimizer.step()
            optimizer.zero_grad()
        expected.append(training.weights(acc, net))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_two_engines_and_one_that_is_not_trained(processes: int, tmp_path: Path) -> None:
    run_world(teacher_and_student, processes, str(tmp_path / "c"), timeout=150)


def in_pieces(folder: str) -> None:
    import deepspeed

    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True, gradient_clipping=0.0, zero3_save_16bit_model=True)
    plugin.transformer_moe_cls_names = "Experts"
    acc = Accelerator(cpu=True, deepspeed_plugin=plugin)
    assert plugin.is_zero3_init_enabled()
    whole = nn.Sequential(training.model(), nn.Linear(3, 24), Experts())
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    with deepspeed.zero.Init(config_dict_or_path=plugin.dschf.config):  # as transformers does it
        net: Any = nn.Sequential(training.model(), nn.Linear(3, 24), Experts())
    assert all(parameter.numel() == 0 for parameter in net.parameters()), "built in pieces"
    for name, parameter in net.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(weights[name])
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
    net, optimizer, loader = acc.prepare(net, optimizer, DataLoader(training.data(), batch_size=4))
    assert deepspeed.utils.get_z3_leaf_modules(net), "experts are fetched as a whole"
    inputs, _ = next(iter(loader))
    torch.testing.assert_close(net(inputs), whole(inputs))
    acc.backward(net(inputs).sum())
    optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        acc.save_state(Path(folder, "state"))
        assert not any("empty tensors" in str(one.message) for one in caught)
        for _ in range(2):
            acc.unwrap_model(net).state_dict()
        said = [str(one.message) for one in caught if "empty tensors" in str(one.message)]
        assert len(said) == 1 and "call `accelerator.get_state_dict(model)`" in said[0], said
    found = acc.get_state_dict(net)
    assert bool(found) == acc.is_main_process
    if found:
        torch.testing.assert_close(dict(found), weights)
    plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    acc.save_model(net, folder)
    if acc.is_main_process:
        torch.testing.assert_close(load_file(Path(folder, "model.safetensors")), weights)
    assert acc.unwrap_model(net)[0][0].weight.numel() == 0
    with acc.autocast():
        pass
    acc.free_memory()


def test_a_model_in_pieces_from_the_start(tmp_path: Path) -> None:
    run_world(in_pieces, 2, str(tmp_path), timeout=100)
