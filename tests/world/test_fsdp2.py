"""FSDP version 2 on real processes: who holds what, and that training is that of one process."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, StateDictType
from torch.distributed.tensor import DTensor

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.parallel import shards
from accelerate.strategies import fsdp2
from accelerate.utils import TorchDynamoPlugin
from tests.harness import run_world
from tests.harness.memory import needs_peak, peak
from tests.harness.torch_features import leaves_parameters_whole
from tests.world.towers import Tower, loss_of, tokens_of, train_alone, trains_as_one_process


def _plugin(**kwargs: Any) -> FullyShardedDataParallelPlugin:
    settings = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    settings |= {"transformer_cls_names_to_wrap": ["Block"]}
    return FullyShardedDataParallelPlugin(**(settings | kwargs))


def _trains_as_one_process(settings: dict[str, Any], steps: int = 20) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(**settings))
    # Only rank 0 has the weights that count.
    plain = Tower(seed=accelerator.process_index)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    trains_as_one_process(accelerator, model, optimizer, steps, accelerator.process_index, accelerator.num_processes)


SETTINGS: dict[str, dict[str, Any]] = {
    "layers": {},
    "found": {"auto_wrap_policy": None, "transformer_cls_names_to_wrap": None},
    "whole": {"auto_wrap_policy": "no_wrap"},
    "size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
    "keep": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
    "recompute": {"activation_checkpointing": True},
    "recompute-offload": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    "ignored": {"ignored_modules": r"blocks\.\d+\.norm"},
    "efficient": {"cpu_ram_efficient_loading": True},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=leaves_parameters_whole if name == "ignored" else ()) for name in SETTINGS]
)
def test_trains_as_one_process(name: str) -> None:
    run_world(_trains_as_one_process, 2, SETTINGS[name])


def test_trains_as_one_process_on_four() -> None:
    run_world(_trains_as_one_process, 4, {})


def _holds_its_part() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    assert accelerator.distributed_type == DistributedType.FSDP
    assert accelerator.is_fsdp2 and accelerator.state.is_fsdp2
    assert accelerator.state.fsdp_plugin.fsdp_version == 2
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    plain = Tower()
    total = sum(p.numel() for p in plain.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of a function of torch that we should no longer call
        model = accelerator.prepare(plain)
    assert model is plain and isinstance(model, Tower) and isinstance(model, FSDPModule)
    assert isinstance(model.blocks[0], FSDPModule) and not isinstance(model.blocks[0].up, FSDPModule)
    assert model.head.weight is model.embed.weight
    held = sum(shards.local(p).numel() for p in model.parameters())
    assert held * accelerator.num_processes == total
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert accelerator.unwrap_model(model) is model


def test_holds_its_part() -> None:
    run_world(_holds_its_part, 2)
    run_world(_holds_its_part, 4)


class Stack(nn.Module):
    """Blocks in a row between others, tied at both ends, with experts and a head that is no block."""

    def __init__(self, **kinds: list[str]) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.body = nn.Sequential(Layers(), Layers(), Layers(), nn.Linear(4, 4))
        self.experts = nn.ModuleList([Layers(), Layers()])
        self.__dict__.update(kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.start(x))
        return out


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Linear(8, 4))


def _finds_blocks() -> None:
    said: list[str] = []
    logger = logging.getLogger("accelerate.strategies.wrapping")
    logger.addFilter(lambda record: bool(said.append(record.getMessage())))
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert accelerator.state.fsdp_plugin.auto_wrap_policy is None

    def units(model: nn.Module) -> list[str]:
        prepared = accelerator.prepare(model)
        return [name for name, part in prepared.named_modules() if isinstance(part, FSDPModule)]

    assert units(Tower()) == ["", *(f"blocks.{number}" for number in range(len(Tower().blocks)))]
    assert [text.partition(":")[0] for text in said] == [
        "No auto_wrap_policy was given, so FSDP gathers each Block of this Tower separately"
    ] * accelerator.is_main_process
    assert units(Stack()) == ["", "body.0", "body.1", "body.2"]
    assert units(Stack(_no_split_modules=["Linear", "Absent"]))[:2] == ["", "start"]
    assert units(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == [""]  # single layers are no blocks
    few = nn.Sequential(nn.Linear(64, 64), nn.Sequential(Layers(), Layers()))
    assert units(few) == [""]  # blocks that are little of it
    accelerator.state.fsdp_plugin.auto_wrap_policy = "no_wrap"
    accelerator.state.fsdp_plugin.__post_init__()
    assert units(Stack()) == [""]
    assert len(said) == accelerator.is_main_process


def test_without_a_policy_the_blocks_of_a_model_are_found() -> None:
    run_world(_finds_blocks, 2)


def _settings_reach_the_engine() -> None:
    variables = {
        "VERSION": "2",
        "RESHARD_AFTER_FORWARD": "false",
        "OFFLOAD_PARAMS": "true",
        "AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "MIN_NUM_PARAMS": "200",
        "IGNORED_MODULES": r"blocks\.\d\.norm",
        "ACTIVATION_CHECKPOINTING": "true",
        "ACTIVATION_CHECKPOINTING_OFFLOAD": "true",
        "CPU_RAM_EFFICIENT_LOADING": "true",
        "STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
    os.environ |= {f"FSDP_{name}": value for name, value in variables.items()} | {"ACCELERATE_USE_FSDP": "true"}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    accelerator = Accelerator(cpu=True)
    plugin = accelerator.state.fsdp_plugin
    plugin.mixed_precision_policy = policy
    assert plugin.cpu_ram_efficient_loading and plugin.activation_checkpointing_offload
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    model: Any = accelerator.prepare(Tower())
    assert isinstance(model.blocks[0], FSDPModule) and not isinstance(model.blocks[0].up, FSDPModule)
    assert not isinstance(model.blocks[0].norm.weight, DTensor)
    assert "forward" in vars(model.blocks[0])  # which computes twice
    state = model.blocks[0]._get_fsdp_state()
    group = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    assert group[0].mp_policy == policy and isinstance(group[0].offload_policy, CPUOffloadPolicy)
    model(tokens_of(0, 0, 1))
    assert group[0].is_unsharded  # until the backward


@leaves_parameters_whole
def test_settings_reach_the_engine() -> None:
    run_world(_settings_reach_the_engine, 2)


WITHOUT_AND_WITH_IGNORED = [None, pytest.param(r"blocks\.1\.norm", marks=leaves_parameters_whole)]


def _whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: shards.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _accumulates(sync_each_batch: bool, ignored: str | None) -> None:
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=_plugin(ignored_modules=ignored), gradient_accumulation_plugin=plugin
    )
    plain = Tower()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    alone = Tower()
    for step in range(3):
        with accelerator.accumulate(model):
            # Nothing is on the sharded parameters before the exchange.
            accelerator.backward(loss_of(model, tokens_of(step, rank, ranks)))
            exchanged = model.blocks[0].up.weight.grad is not None
            assert exchanged == (sync_each_batch or step == 2)
            optimizer.step()
        (loss_of(alone, tokens_of(step, 0, 1)) / 3).backward()
    found = _whole_gradients(model)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("ignored", WITHOUT_AND_WITH_IGNORED)
def test_accumulates(sync_each_batch: bool, ignored: str | None) -> None:
    run_world(_accumulates, 2, sync_each_batch, ignored)


def _sync_in_backward() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    model = accelerator.prepare(Tower())
    rank, ranks = accelerator.process_index, accelerator.num_processes
    with accelerator.no_sync(model):
        first = loss_of(model, tokens_of(0, rank, ranks))
        accelerator.backward(first)
        assert model.head.weight.grad is None
        second = loss_of(model, tokens_of(1, rank, ranks))
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    alone = Tower()
    (loss_of(alone, tokens_of(0, 0, 1)) + loss_of(alone, tokens_of(1, 0, 1))).backward()
    found = _whole_gradients(model)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_sync_in_backward() -> None:
    run_world(_sync_in_backward, 2)


def _mean_over_items() -> None:
    """`num_items` in windows of two micro-batches, with different numbers of items on each rank."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(), gradient_accumulation_steps=2)
    plain = Tower()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    alone = Tower()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    everything = [tokens_of(step, 0, 1, samples=4 + 2 * step) for step in range(4)]
    for window in (everything[:2], everything[2:]):
        items = sum(batch.shape[0] for batch in window)
        for batch in window:
            mine = batch[:1] if accelerator.process_index == 0 else batch[1:]
            with accelerator.accumulate(model):
                logits = model(mine)
                loss = nn.functional.mse_loss(logits, torch.ones_like(logits), reduction="sum")
                accelerator.backward(loss, num_items=len(mine))
                optimizer.step()
                optimizer.zero_grad()
            logits = alone(batch)
            (nn.functional.mse_loss(logits, torch.ones_like(logits), reduction="sum") / items).backward()
        reference.step()
        reference.zero_grad()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(shards.whole(mine), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_mean_over_items() -> None:
    run_world(_mean_over_items, 2)


def _clips_any_list(norm_type: float, ignored: str | None) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(ignored_modules=ignored))
    model = accelerator.prepare(Tower())
    alone = Tower()
    rank, ranks = accelerator.process_index, accelerator.num_processes
    accelerator.backward(loss_of(model, tokens_of(0, rank, ranks)))
    loss_of(alone, tokens_of(0, 0, 1)).backward()
    for names in (
        ["blocks.0.up.weight"],
        ["embed.weight", "blocks.1.norm.bias"],
        [n for n, _ in alone.named_parameters()],
    ):
        mine = [p for n, p in model.named_parameters() if n in names]
        theirs = [p for n, p in alone.named_parameters() if n in names]
        norm = accelerator.clip_grad_norm_(iter(mine), 0.05, norm_type=norm_type)
        expected = nn.utils.clip_grad_norm_(theirs, 0.05, norm_type=norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(shards.whole(a.grad), b.grad, rtol=1e-4, atol=1e-6)
    assert not isinstance(norm, DTensor)
    assert float(accelerator.clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0)) == 0.0
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    assert max(float(g.abs().max()) for g in _whole_gradients(model).values()) <= 1e-4


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("ignored", WITHOUT_AND_WITH_IGNORED)
def test_clips_any_list(norm_type: float, ignored: str | None) -> None:
    run_world(_clips_any_list, 2, norm_type, ignored)


def _keeps_groups_and_state() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    plain, alone = Tower(), Tower()

    def optimizer_of(model: Tower) -> torch.optim.Optimizer:
        decay = [p for n, p in model.named_parameters() if n.endswith("weight")]
        rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    mine, theirs = optimizer_of(plain), optimizer_of(alone)
    for model, optimizer in ((plain, mine), (alone, theirs)):  # some steps before anything is sharded
        for step in range(2):
            loss_of(model, tokens_of(step, 0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    prepared = accelerator.prepare(mine)  # each by itself, the optimizer first
    model = accelerator.prepare(plain)
    assert [len(group["params"]) for group in prepared.param_groups] == [len(g["params"]) for g in theirs.param_groups]
    assert {id(p) for g in prepared.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert set(prepared.state) == set(model.parameters())
    state = prepared.state[model.blocks[0].up.weight]
    assert isinstance(state["exp_avg"], DTensor) and float(state["step"]) == 2.0
    rank, ranks = accelerator.process_index, accelerator.num_processes
    for step in range(2, 6):
        accelerator.backward(loss_of(model, tokens_of(step, rank, ranks)))
        prepared.step()
        prepared.zero_grad()
        loss_of(alone, tokens_of(step, 0, 1)).backward()
        theirs.step()
        theirs.zero_grad()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(shards.whole(a), b.detach(), rtol=0, atol=2e-5)


def test_keeps_groups_and_state() -> None:
    run_world(_keeps_groups_and_state, 2)


def _frozen_and_several() -> None:
    """Adapters on a frozen model, and a second model that nobody trains."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    plain, reference = Tower(), Tower(seed=3)
    alone, alone_reference = Tower(), Tower(seed=3)
    for model in (plain, alone):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" in name)
    inner = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    theirs = torch.optim.Adam([p for p in alone.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, judge = accelerator.prepare(plain, inner, reference)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    for step in range(4):
        tokens = tokens_of(step, rank, ranks)
        with torch.no_grad():
            target = judge(tokens)
        accelerator.backward(nn.functional.mse_loss(model(tokens), target))
        optimizer.step()
        optimizer.zero_grad()
        tokens = tokens_of(step, 0, 1)
        nn.functional.mse_loss(alone(tokens), alone_reference(tokens).detach()).backward()
        theirs.step()
        theirs.zero_grad()
    for (name, a), b in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert a.requires_grad == b[1].requires_grad == ("up" in name)
        torch.testing.assert_close(shards.whole(a), b[1].detach(), rtol=0, atol=1e-5)


def test_frozen_and_several() -> None:
    run_world(_frozen_and_several, 2)


def _precision(mode: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=mode, fsdp_plugin=_plugin())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    assert accelerator.state.fsdp_plugin.mixed_precision_policy.param_dtype is dtype
    plain = Tower().to(dtype)  # as pretrained weights often come
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    seen = []
    model.blocks[0].up.register_forward_hook(lambda module, args, out: seen.append(module.weight.dtype))
    assert all(p.dtype is torch.float32 for p in model.parameters())
    rank, ranks = accelerator.process_index, accelerator.num_processes
    losses = []
    for _ in range(6):
        tokens = tokens_of(0, rank, ranks)
        logits = model(tokens)
        assert logits.dtype is torch.float32
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    assert set(seen) == {dtype}
    expected, _, _ = train_alone(1)
    assert abs(losses[0] - expected[0]) < 0.05
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_precision(mode: str) -> None:
    run_world(_precision, 2, mode)


def _skips_together() -> None:
    """An infinite gradient in the piece of one process: nobody steps."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", fsdp_plugin=_plugin())
    plain = Tower()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    before = shards.whole(model.head.weight)
    accelerator.backward(loss_of(model, tokens_of(0, accelerator.process_index, 2)) * 1e-3)
    piece = shards.local(model.blocks[1].down.weight.grad)
    if accelerator.process_index == 1:
        piece[0, 0] = float("inf")
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(shards.whole(model.head.weight), before)
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, tokens_of(0, accelerator.process_index, 2)) * 1e-3)
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_skips_together() -> None:
    run_world(_skips_together, 2)


def _refuses() -> list[str]:
    messages = []
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(ignored_modules="nothing"))
    with pytest.raises(ValueError) as caught:
        accelerator.prepare(Tower())
    messages.append(str(caught.value))
    accelerator.state.fsdp_plugin.ignored_modules = None
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = ["Nobody"]
    with pytest.raises(ValueError) as caught:
        accelerator.prepare(Tower())
    messages.append(str(caught.value))
    return messages


def test_refuses() -> None:
    for first, second in run_world(_refuses, 2):
        assert "ignored_modules is 'nothing'" in first
        assert "Nobody" in second and "Block" in second


def _compiled(way: str) -> None:
    """Compiled before it is sharded, by the script, or afterwards by the Accelerator, as a whole or block by block."""
    by_us = way != "before"
    dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=way == "blocks") if by_us else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(), dynamo_plugin=dynamo)
    plain = Tower()
    given: Any = plain if by_us else torch.compile(plain, backend="eager")
    model, optimizer = accelerator.prepare(given, torch.optim.AdamW(given.parameters(), lr=1e-2))
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is plain
    assert isinstance(plain, FSDPModule)
    losses = []
    for step in range(3):
        loss = loss_of(model, tokens_of(step, accelerator.process_index, accelerator.num_processes))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    torch.testing.assert_close(losses, train_alone(3)[0], rtol=0, atol=1e-5)
    state = accelerator.get_state_dict(model)
    assert set(state) == (set(Tower().state_dict()) if accelerator.is_main_process else set())


@pytest.mark.parametrize("way", ["before", "whole", "blocks"])
def test_compiled(way: str) -> None:
    run_world(_compiled, 2, way, timeout=120)


def _older_torch() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce = getattr(dist, name)
    setattr(dist, name, lambda out, given, op: reduce(out, given))  # a sum, whatever was asked for
    with pytest.raises(RuntimeError, match=r"FSDP version 2 does not run on CPUs with torch .*: update torch, or use"):
        accelerator.prepare(Tower())
    setattr(dist, name, reduce)
    fsdp2.fully_shard = lambda module, *, mesh: module  # type: ignore[assignment]
    accelerator.state.fsdp_plugin.ignored_modules = "head"
    with pytest.raises(RuntimeError, match=r"leave parameters unsharded .* since torch 2\.7, but this is"):
        accelerator.prepare(Tower())


def test_what_older_releases_of_torch_cannot_do_is_said() -> None:
    run_world(_older_torch, 2)


def _cannot_join() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin())
    model = accelerator.prepare(Tower())
    with pytest.warns(UserWarning, match="`join_uneven_inputs` does nothing"):
        with accelerator.join_uneven_inputs([model]):
            model(tokens_of(0, 0, 1))


def test_cannot_join() -> None:
    run_world(_cannot_join, 2)


def _memory(folder: str) -> tuple[int, int, int]:
    """What preparing adds to a model that only rank 0 has, and what saving its pieces adds; and how large it is."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=_plugin(cpu_ram_efficient_loading=True))
    accelerator.prepare(Tower())  # whatever is needed once
    accelerator.save_state(f"{folder}/first")
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = Tower(width=512, depth=64)  # large beside what threads and the allocator take once
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    loading = peak(lambda: accelerator.prepare(model))
    return loading, peak(lambda: accelerator.save_state(f"{folder}/second")), size


@needs_peak
def test_memory_of_the_first_process(tmp_path: Path) -> None:
    (first, saving, size), (second, _, _) = run_world(_memory, 2, str(tmp_path))
    # Rank 0 has the whole model and gets its half of it, the other one only its half, and one tensor at a time.
    assert size + first <= 1.1 * 1.5 * size
    assert second < 0.95 * size
    # Written from where they are.
    assert size / 2 + saving <= 1.1 * size / 2
