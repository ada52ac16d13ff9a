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
