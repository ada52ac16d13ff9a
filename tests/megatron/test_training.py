"""Megatron-LM trains as a plain loop on one process does, however it spreads the model: losses of 20 steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_world
from tests.megatron import training


def losses(*several: dict[str, Any]) -> list[list[float]]:
    return [training.train(**settings) for settings in several]


def check(processes: int, **settings: dict[str, Any]) -> None:
    wanted = {layers: training.plain(layers) for layers in {each.get("layers", 2) for each in settings.values()}}
    for rank in run_world(losses, processes, *settings.values(), timeout=150):
        for (name, each), found in zip(settings.items(), rank, strict=True):
            assert found == pytest.approx(wanted[each.get("layers", 2)], abs=1e-3), name


def test_on_two_processes() -> None:
    check(
        2,
        tensors={"tp_degree": 2},
        stages={"pp_degree": 2, "micro_batches": 4},
        copies={"micro_batches": 2},
        sequences={"tp_degree": 2, "sequence_parallelism": True},
        shards={"use_distributed_optimizer": True},
        selective={"tp_degree": 2, "recompute_granularity": "selective"},
        turns={"pp_degree": 2, "micro_batches": 4, "layers": 4, "num_layers_per_virtual_pipeline_stage": 1},
        own_tensors=training.provided(tp_degree=2),
        own_stages=training.provided(pp_degree=2) | {"micro_batches": 2},
    )


def test_tensors_and_stages_on_four_processes() -> None:
    check(4, both={"tp_degree": 2, "pp_degree": 2, "micro_batches": 2}, copies={"pp_degree": 2, "micro_batches": 2})
