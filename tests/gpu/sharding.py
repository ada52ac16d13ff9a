"""Sharded training on one GPU: a world of one process, where the engines run all the same."""

from __future__ import annotations

import copy
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from tests.gpu.checks import check, reset


@contextmanager
def launched() -> Iterator[None]:
    """As under `torchrun --nproc_per_node 1`."""
    from accelerate.state import PartialState
    from accelerate.utils import patch_environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "accelerate_use_fsdp": "false"}
    with patch_environment(**variables, master_addr="127.0.0.1", master_port=port):
        reset()
        try:
            yield
        finally:
            PartialState().destroy_process_group()
            reset()


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    block = [torch.nn.Linear(256, 256), torch.nn.GELU()]
    return torch.nn.Sequential(*[copy.deepcopy(layer) for _ in range(4) for layer in block], torch.nn.Linear(256, 8))


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 256, generator=generator), torch.randint(0, 8, (32,), generator=generator))
        for _ in range(count)
    ]


def _plain(steps: int) -> list[float]:
    model = _network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x, y in _batches(steps):
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sharded(steps: int, settings: dict[str, Any], **kwargs: Any) -> tuple[list[float], Any, Any, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=60000, **settings)
    accelerator = Accelerator(fsdp_plugin=plugin, **kwargs)
    assert accelerator.distributed_type == "FSDP" and accelerator.device.type == "cuda"
    model = _network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for x, y in _batches(steps):
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator, model, optimizer


def _close(found: list[float], expected: list[float], tolerance: float) -> None:
    assert all(abs(a - b) < tolerance for a, b in zip(found, expected, strict=True)), (found, expected)


@check
def fsdp2_trains_as_plain_pytorch() -> None:
    expected = _plain(10)
    with launched():
        _close(_sharded(10, {"fsdp_version": 2})[0], expected, 1e-4)


@check
def fsdp2_offloads_to_the_host() -> None:
    expected = _plain(10)
    with launched():
        losses, _, model, optimizer = _sharded(10, {"fsdp_version": 2, "cpu_offload": True})
        _close(losses, expected, 1e-4)
        assert all(p.to_local().device.type == "cpu" for p in model.parameters())
        state = next(iter(optimizer.state.values()))
        assert state["exp_avg"].to_local().device.type == "cpu"


class Scaled(torch.nn.Module):
    """Has what cannot be cut, a parameter without a dimension, and what does not lie row by row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.conv(x.view(-1, 4, 8, 8)).mean((2, 3))) * self.scale
        return out


@check
def fsdp2_leaves_scalars_whole() -> None:
    def train(model: torch.nn.Module, optimizer: Any, backward: Any) -> list[float]:
        losses = []
        for x, y in _batches(6):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plain = Scaled().cuda()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), lambda loss: loss.backward())
    for offload in (False, True):
        with launched():
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=offload)
            accelerator = Accelerator(fsdp_plugin=plugin)
            model: Any = Scaled()
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            _close(train(model, optimizer, accelerator.backward), expected, 1e-4)


@check
def fsdp2_recomputes_and_offloads_activations() -> None:
    expected = _plain(6)
    with launched():
        settings = {"fsdp_version": 2, "activation_checkpointing": True, "activation_checkpointing_offload": True}
        _close(_sharded(6, settings)[0], expected, 1e-4)


@check
def fsdp1_trains_as_plain_pytorch() -> None:
    expected = _plain(10)
    for settings in ({}, {"use_orig_params": True}, {"cpu_offload": True}):
        with launched():
            _close(_sharded(10, {"fsdp_version": 1, **settings})[0], expected, 1e-4)


@check
def fsdp2_in_mixed_precision() -> None:
    expected = _plain(10)
    for mode in ("bf16", "fp16"):
        with launched():
            losses, accelerator, model, _ = _sharded(10, {"fsdp_version": 2}, mixed_precision=mode)
            _close(losses, expected, 0.1)
            assert model(_batches(1)[0][0].cuda()).dtype is torch.float32
            assert (accelerator.scaler is not None) == (mode == "fp16")


@check
def fsdp_checkpoints() -> None:
    for settings in ({"fsdp_version": 2}, {"fsdp_version": 2, "cpu_offload": True}, {"fsdp_version": 1}):
        for behind in (False, True):
            with launched(), tempfile.TemporaryDirectory() as folder:
                _, accelerator, model, optimizer = _sharded(3, settings)
                accelerator.save_state(f"{folder}/checkpoint", async_save=behind)

                def step(accelerator: Any = accelerator, model: Any = model, optimizer: Any = optimizer) -> float:
                    x, y = _batches(1)[0]
                    loss = F.cross_entropy(model(x.cuda()), y.cuda())
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    return float(loss.detach())

                expected = [step() for _ in range(3)]
                accelerator.wait_for_checkpoint()
                accelerator.load_state(f"{folder}/checkpoint")
                _close([step() for _ in range(3)], expected, 1e-5)
                accelerator.save_model(model, f"{folder}/weights")


@check
def fsdp_saves_inside_a_window() -> None:
    """Two micro-batches into a window of three: what follows is the same after a load."""
    settings: list[dict[str, Any]] = [{"fsdp_version": 2}, {"fsdp_version": 2, "cpu_offload": True}]
    settings += [{"fsdp_version": 1}, {"fsdp_version": 1, "use_orig_params": True}]
    for one in settings:
        with launched(), tempfile.TemporaryDirectory() as folder:
            _, accelerator, model, optimizer = _sharded(1, one)
            accelerator.gradient_accumulation_steps = 3

            def train(
                start: int, accelerator: Any = accelerator, model: Any = model, optimizer: Any = optimizer
            ) -> Any:
                losses = []
                for x, y in _batches(start + 5)[start:]:
                    with accelerator.accumulate(model):
                        loss = F.cross_entropy(model(x.cuda()), y.cuda())
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                    losses.append(float(loss.detach()))
                return losses

            train(0)
            accelerator.save_state(f"{folder}/checkpoint")
            expected = train(5)
            accelerator.load_state(f"{folder}/checkpoint")
            _close(train(5), expected, 1e-6)
