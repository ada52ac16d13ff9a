"""Functions that scripts put in place of the package's own are used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import accelerate
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.strategies import fsdp_tools
from tests.harness import run_world
from tests.world.towers import Tower, trains_as_one_process


def _shards_by_itself(wraps_ours: bool) -> int:
    calls = []

    def prepare(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        calls.append(accelerator)
        if wraps_ours:
            return fsdp_tools.OWN_PREPARE_MODEL(accelerator, model)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        return fully_shard(model)

    accelerate.accelerator.fsdp2_prepare_model = prepare  # type: ignore[attr-defined]
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    )
    plain = Tower(seed=0)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert calls == [accelerator]
    assert isinstance(model.blocks[0], FSDPModule) is not wraps_ours
    trains_as_one_process(accelerator, model, optimizer, 5, accelerator.process_index, accelerator.num_processes)
    return len(calls)


def test_a_script_shards_by_itself() -> None:
    assert run_world(_shards_by_itself, 2, False) == [1, 1]


def test_a_script_wraps_our_sharding() -> None:
    assert run_world(_shards_by_itself, 2, True) == [1, 1]


def _stays_alone(backend: str | None, label: DistributedType) -> tuple[int, str | None]:
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str | None, DistributedType]:
        return backend, label

    PartialState._prepare_backend = prepare_backend  # type: ignore[method-assign]
    state = PartialState(cpu=True)
    return state.num_processes, state.backend


def test_a_script_keeps_processes_apart() -> None:
    assert run_world(_stays_alone, 2, None, DistributedType.NO) == [(1, None)] * 2
    assert run_world(_stays_alone, 2, "gloo", DistributedType.MULTI_CPU) == [(2, "gloo")] * 2
