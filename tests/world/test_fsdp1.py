"""FSDP version 1 on real processes: who holds what, and that training is that of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.errors import CheckpointError
from accelerate.utils import DataLoaderConfiguration, TorchDynamoPlugin
from tests.harness import run_world
from tests.harness.torch_features import compiles_flat_parameters
from tests.unit.accelerator.toys import loader
from tests.world.towers import Block, Tower, loss_of, tokens_of, trains_as_one_process


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


@pytest.mark.parametrize(("strategy", "own"), [("HYBRID_SHARD", False), ("HYBRID_SHARD_ZERO2", True)])
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


def _settings_reach_the_engine() -> None:
    variables = {
        "SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "BACKWARD_PREFETCH": "BACKWARD_POST",
        "FORWARD_PREFETCH": "true",
        "USE_ORIG_PARAMS": "true",
        "SYNC_MODULE_STATES": "true",
        "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "TRANSFORMER_CLS_TO_WRAP": "Block",
        "IGNORED_MODULES": r"blocks\.1",
        "STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "ACTIVATION_CHECKPOINTING": "true",
    }
    os.environ |= {f"FSDP_{name}": value for name, value in variables.items()}
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, limit_all_gathers=False, mixed_precision_policy=policy)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    plain = Tower()
    model: Any = accelerator.prepare(plain)
    assert [isinstance(block, Wrapper) for block in plain.blocks] == [True, False]
    for wrapped in (model, plain.blocks[0]):
        assert wrapped.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
        assert wrapped.backward_prefetch == BackwardPrefetch.BACKWARD_POST and wrapped.forward_prefetch
        assert wrapped._use_orig_params and not wrapped.limit_all_gathers and wrapped.mixed_precision == policy
    assert "forward" in vars(plain.blocks[0].module)  # which computes twice
    assert accelerator.state.fsdp_plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT


def test_settings_reach_the_engine() -> None:
    run_world(_settings_reach_the_engine, 2)


def _makes_its_parameters(first_has_weights: bool) -> None:
    """`param_init_fn`: for models without memory; whatever the first process has counts for all."""

    def make(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, float(accelerator.process_index + 1))

    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(param_init_fn=make, use_orig_params=True))
    with torch.device("cpu" if first_has_weights and accelerator.is_main_process else "meta"):
        plain = Tower()
    plain.shift = Tower().shift
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    if first_has_weights:
        trains_as_one_process(accelerator, model, optimizer, 4, accelerator.process_index, accelerator.num_processes)
    else:
        assert all(bool((p == 1.0).all()) for p in model.parameters())
        accelerator.backward(loss_of(model, tokens_of(0, accelerator.process_index, 2)))
        optimizer.step()


@pytest.mark.parametrize("first_has_weights", [False, True])
def test_makes_its_parameters(first_has_weights: bool) -> None:
    run_world(_makes_its_parameters, 2, first_has_weights)


def _compiled(way: str) -> None:
    """Compiled before it is sharded, by the script, or block by block afterwards: parameters keep their names."""
    by_us = way == "blocks"
    dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=True) if by_us else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(use_orig_params=by_us), dynamo_plugin=dynamo)
    plain = Tower()
    given: Any = plain if by_us else torch.compile(plain, backend="eager")
    model, optimizer = accelerator.prepare(given, torch.optim.AdamW(given.parameters(), lr=1e-2))
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is plain
    trains_as_one_process(accelerator, model, optimizer, 2, accelerator.process_index, accelerator.num_processes)


@pytest.mark.parametrize("way", [pytest.param("before", marks=compiles_flat_parameters), "blocks"])
def test_compiled(way: str) -> None:
    run_world(_compiled, 2, way, timeout=120)


def _wrapped_by_the_script(folder: str, own: bool) -> None:
    """Before it is prepared; it is trained, saved and loaded all the same."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    given = Wrapper(
        Tower(),
        device_id=torch.device("cpu"),
        use_orig_params=own,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    model, optimizer = accelerator.prepare(given, torch.optim.AdamW(given.parameters(), lr=1e-2))
    assert model is given
    trains_as_one_process(accelerator, model, optimizer, 4, accelerator.process_index, accelerator.num_processes)
    accelerator.save_state(folder)
    before = accelerator.get_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    for name, value in accelerator.get_state_dict(model).items():
        assert torch.equal(value, before[name])
    half = nn.Sequential(Wrapper(nn.Linear(2, 2), device_id=torch.device("cpu")), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="wrap all of it, or nothing"):
        accelerator.prepare(half)


@pytest.mark.parametrize("own", [False, True])
def test_wrapped_by_the_script(tmp_path: Path, own: bool) -> None:
    run_world(_wrapped_by_the_script, 2, str(tmp_path / "checkpoint"), own)


def _optimizer_of_two_models(folder: str) -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    one, other = Tower(), Tower(seed=1)
    accelerator.prepare(one, other, torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1))
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state(folder)
    return str(caught.value)


def test_optimizer_of_two_models(tmp_path: Path) -> None:
    for message in run_world(_optimizer_of_two_models, 2, str(tmp_path / "checkpoint")):
        assert "parameters of 2 prepared models" in message


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
