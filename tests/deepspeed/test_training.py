"""Every stage of ZeRO trains as DDP does: losses, norms of gradients, weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.deepspeed import training
from tests.harness import run_world

SETTINGS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "offload_optimizer_device": "cpu"},
    {"stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
]
WAYS: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"clip": 0.5, "accumulate": 2}, {"items": True, "accumulate": 2}]


def compare(precision: str) -> None:
    for way in WAYS:
        expected = training.train(None, precision, **way)
        for settings in SETTINGS:
            own = {**way, **settings, "precision": precision}
            if "clip" in way:
                own["gradient_clipping"] = "auto"
            found = training.train(**own)
            close = {"rtol": 2e-5, "atol": 2e-6} if precision == "no" else {"rtol": 0.03, "atol": 0.01}
            for name in ("losses", "norms", "weights", "rate"):
                torch.testing.assert_close(
                    found[name], expected[name], **close, msg=lambda text, own=own, name=name: f"{own}, {name}: {text}"
                )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_as_with_ddp(processes: int, precision: str) -> None:
    run_world(compare, processes, precision, timeout=200)


def in_fp16() -> None:
    """DeepSpeed says that a CPU has no fp16; torch has it there, slowly."""
    from deepspeed.accelerator import get_accelerator

    here = get_accelerator()
    here.is_fp16_supported = lambda: True
    here.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    found = {}
    for stage in range(4):
        acc = training.accelerator(stage, precision="fp16", accumulate=2)
        acc.deepspeed_plugin.deepspeed_config["fp16"] |= {"initial_scale_power": 8, "hysteresis": 1}
        net = training.model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, eps=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = torch.utils.data.DataLoader(training.data(), batch_size=4)
        net, optimizer, scheduler, loader = acc.prepare(net, optimizer, scheduler, loader)
        norms, skipped = [], []
        for count, (inputs, targets) in zip(range(8), loader, strict=False):
            with acc.accumulate(net):
                loss = training.loss_of(net(inputs), targets) * (float("inf") if count == 4 else 1.0)
                acc.backward(loss)
                if acc.sync_gradients:
                    norms.append(float(acc.clip_grad_norm_(net.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if acc.sync_gradients:
                skipped.append(acc.optimizer_step_was_skipped)
        assert skipped == [False, False, True, False], (stage, skipped)
        assert scheduler.get_last_lr() == [0.02 / 4], (stage, scheduler.get_last_lr())
        found[stage] = (norms[:2] + norms[3:], training.weights(acc, net))
        acc.free_memory()
        acc.state._reset_state(reset_partial_state=False)
    for stage in range(1, 4):
        torch.testing.assert_close(found[stage], found[0], rtol=5e-3, atol=2e-3)
    assert all(0.05 < norm < 20 for norm in found[0][0]), "without the scale of the losses"


def test_every_stage_is_the_same_in_fp16() -> None:
    run_world(in_fp16, 1, timeout=100)
