"""FSDP version 1 on real processes: who holds what, and that training is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils import DataLoaderConfiguration
from tests.harness import run_world
from tests.unit.accelerator.toys import loader
from tests.world.towers import Tower, loss_of, tokens_of, trains_as_one_process


def _plugin(**kwargs: Any) -> FullyShardedDataParallelPlugin:
    settings = {"fsdp_version": 1, "auto_wrap_policy": "transformer_based_wrap"}
    settings |= {"transformer_cls_names_to_wrap": ["Block"]}
    return FullyShardedDataParallelPlugin(**(settings | kwargs))


def _trains_as_one_process(settings: dict[str, Any], steps: int = 20) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(**settings))
    assert accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
    plain = Tower(seed=accelerator.process_index)
    if settings.get("cpu_ram_efficient_loading") and accelerator.process_index > 0:
        with torch.device("meta"):
            plain = Tower()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert isinstance(model, Wrapper)
    trains_as_one_process(accelerator, model, optimizer, steps, accelerator.process_index, accelerator.num_processes)


SETTINGS: dict[str, dict[str, Any]] = {
    "layers": {},
    "own-parameters": {"use_orig_params": True},
    "whole": {"auto_wrap_policy": "no_wrap"},
    "size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
    "zero2": {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True},
    "copies": {"sharding_strategy": "NO_SHARD"},
    "offload": {"cpu_offload": True},
    "recompute": {"activation_checkpointing": True, "use_orig_params": True},
    "ignored": {"ignored_modules": r"blocks\.\d+\.norm", "use_orig_params": True},
    "efficient": {"cpu_ram_efficient_loading": True},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
def test_trains_as_one_process(name: str) -> None:
    run_world(_trains_as_one_process, 2, SETTINGS[name])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_copies_of_shards(strategy: str, own: bool) -> None:
    """Two machines of two processes each."""
    settings = {"sharding_strategy": strategy, "use_orig_params": own}
    run_world(_trains_as_one_process, 4, settings, env={"LOCAL_WORLD_SIZE": "2"})


def _holds_its_part() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    plain = Tower()
    total = sum(p.numel() for p in plain.parameters())
    model = accelerator.prepare(plain)
    held = sum(p.numel() for p in model.parameters())
    assert total / accelerator.num_processes <= held <= total / accelerator.num_processes + 2
    assert accelerator.unwrap_model(model) is plain
    assert isinstance(plain.blocks[0], Wrapper)


def test_holds_its_part() -> None:
    run_world(_holds_its_part, 2)


def _groups_and_state(own: bool) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(use_orig_params=own))
    plain, alone = Tower(), Tower()

    def optimizer_of(model: Tower) -> torch.optim.Optimizer:
        if not own:
            return torch.optim.AdamW(model.parameters(), lr=1e-2)
        decay = [p for n, p in model.named_parameters() if n.endswith("weight")]
        rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], lr=1e-2)

    mine, theirs = optimizer_of(plain), optimizer_of(alone)
    for model, optimizer in ((plain, mine), (alone, theirs)):
        for step in range(2):
            loss_of(model, tokens_of(step, 0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    prepared = accelerator.prepare(mine)
    model = accelerator.prepare(plain)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    for step in range(2, 6):
        accelerator.backward(loss_of(model, tokens_of(step, rank, ranks)))
        prepared.step()
        prepared.zero_grad()
        loss_of(alone, tokens_of(step, 0, 1)).backward()
        theirs.step()
        theirs.zero_grad()
    state = accelerator.get_state_dict(model)
    for name, value in state.items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("own", [False, True])
def test_groups_and_state(own: bool) -> None:
    run_world(_groups_and_state, 2, own)


def _accumulates_and_clips(own: bool) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(use_orig_params=own), gradient_accumulation_steps=3)
    plain = Tower()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    alone = Tower()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, tokens_of(step, rank, ranks)))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        (loss_of(alone, tokens_of(step, 0, 1)) / 3).backward()
        if step % 3 == 2:
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
            reference.step()
            reference.zero_grad()
    for name, value in accelerator.get_state_dict(model).items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=1e-5)
    with accelerator.no_sync(model):
        first = loss_of(model, tokens_of(0, rank, ranks))
        accelerator.backward(first)
        second = loss_of(model, tokens_of(1, rank, ranks))
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    ((loss_of(alone, tokens_of(0, 0, 1)) + loss_of(alone, tokens_of(1, 0, 1))) / 3).backward()
    some = [p for p in model.parameters() if p.grad is not None]
    norm = accelerator.clip_grad_norm_(some, 1e9)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 1e9), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("own", [False, True])
def test_accumulates_and_clips(own: bool) -> None:
    run_world(_accumulates_and_clips, 2, own)


def _refuses() -> list[str]:
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=_plugin(), dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    plain = Tower()
    groups = [{"params": [p]} for p in plain.parameters()]
    messages = []
    with pytest.raises(ValueError) as caught:
        accelerator.prepare(plain, torch.optim.SGD(groups, lr=0.1))
    messages.append(str(caught.value))
    accelerator.prepare(loader(32))
    with pytest.raises(ValueError) as caught:
        accelerator.prepare(loader(33))
    messages.append(str(caught.value))
    return messages


def test_refuses() -> None:
    for groups, uneven in run_world(_refuses, 2):
        assert "pass use_orig_params=True" in groups
        assert "even_batches=False" in uneven
