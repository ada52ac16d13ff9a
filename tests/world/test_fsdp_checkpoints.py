"""Checkpoints of sharded models: saved by any engine on any number of processes, loaded by any other."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.checkpointing import verify_checkpoint
from accelerate.errors import CheckpointError
from accelerate.parallel.shards import whole
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import load_checkpoint_in_model
from tests.harness import run_world
from tests.unit.accelerator.toys import ALONE
from tests.world.towers import Tower, loss_of, tokens_of

STEPS = 3


def _plugin(version: int, kind: str = "SHARDED_STATE_DICT", **kwargs: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type=kind,
        **kwargs,
    )


def _engine(name: str) -> dict[str, Any]:
    if name == "fsdp1":
        return {"fsdp_plugin": _plugin(1, use_orig_params=True)}
    if name == "unsharded":
        return {"fsdp_plugin": _plugin(1, sharding_strategy="NO_SHARD")}
    if name == "flat":
        return {"fsdp_plugin": _plugin(1)}
    if name == "fsdp2":
        return {"fsdp_plugin": _plugin(2)}
    if name == "fsdp1-full":
        return {"fsdp_plugin": _plugin(1, "FULL_STATE_DICT", use_orig_params=True)}
    if name == "fsdp2-full":
        return {"fsdp_plugin": _plugin(2, "FULL_STATE_DICT")}
    if name == "hsdp":
        return {
            "fsdp_plugin": _plugin(2),
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=dist.get_world_size() // 2),
        }
    return {}


SAVE = {1: ["single"], 2: ["ddp", "fsdp1", "fsdp2", "fsdp1-full", "fsdp2-full"], 4: ["fsdp1", "fsdp2", "hsdp"]}
LOAD = {1: ["single"], 2: ["ddp", "fsdp1", "fsdp2"], 4: ["ddp", "fsdp1", "fsdp2", "hsdp"]}


def _prepared(name: str, seed: int = 0, flat: bool = False) -> tuple[Accelerator, Any, Any]:
    """flat: one group of parameters, as flat ones cannot be told apart."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState(cpu=True)
    accelerator = Accelerator(cpu=True, **_engine(name))
    assert (accelerator.distributed_type == DistributedType.FSDP) == (name not in ("single", "ddp"))
    plain = Tower(seed=seed)
    plain.shift = Tower().shift  # which is not saved
    groups: Any = plain.parameters()
    if not flat:
        # Two groups, so that the order of parameters is not that of the model.
        weights = [p for n, p in plain.named_parameters() if "weight" in n]
        groups = [{"params": weights, "lr": 2e-2}, {"params": [p for n, p in plain.named_parameters() if "bias" in n]}]
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(groups, lr=1e-2))
    return accelerator, model, optimizer


def _train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    rank, ranks = accelerator.process_index, accelerator.num_processes
    losses = []
    for step in steps:
        loss = loss_of(model, tokens_of(step, rank, ranks))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def _save_all(folder: str, names: list[str], flat: bool = False) -> list[float]:
    losses = []
    for name in names:
        accelerator, model, optimizer = _prepared(name, flat=flat)
        _train(accelerator, model, optimizer, range(STEPS))
        target = f"{folder}/{name}-{accelerator.num_processes}"
        accelerator.save_state(target)
        verify_checkpoint(target)
        losses = _train(accelerator, model, optimizer, range(STEPS, 2 * STEPS))
    return losses


def _load_all(folder: str, names: list[str], flat: bool = False) -> dict[str, list[float]]:
    found = {}
    for name in names:
        for path in sorted(Path(folder).iterdir()):
            accelerator, model, optimizer = _prepared(name, seed=7, flat=flat)
            accelerator.load_state(path)
            found[f"{path.name} -> {name}-{accelerator.num_processes}"] = _train(
                accelerator, model, optimizer, range(STEPS, 2 * STEPS)
            )
    return found


def _env(processes: int) -> dict[str, str | None]:
    return dict(ALONE) if processes == 1 else {}


def _save_and_load(folder: Path, save: dict[int, list[str]], load: dict[int, list[str]], flat: bool) -> None:
    expected: list[float] = []
    for processes, names in save.items():
        found = run_world(_save_all, processes, str(folder), names, flat, env=_env(processes))
        expected = expected or found[0]
        assert found[0] == pytest.approx(expected, abs=1e-5)
    for processes, names in load.items():
        (losses, *_) = run_world(_load_all, processes, str(folder), names, flat, env=_env(processes), timeout=120)
        assert len(losses) == len(names) * sum(map(len, save.values()))
        for way, values in losses.items():
            assert values == pytest.approx(expected, abs=1e-5), way


def test_any_engine_loads_what_any_engine_saved(tmp_path: Path) -> None:
    _save_and_load(tmp_path, SAVE, LOAD, False)


def test_flat_parameters(tmp_path: Path) -> None:
    save, load = ["flat", "unsharded"], ["flat", "unsharded", "fsdp2", "fsdp1"]
    _save_and_load(tmp_path, {1: ["single"], 2: save}, {1: ["single"], 2: load}, True)


def _saves_behind_the_training(folder: str, version: int) -> None:
    accelerator, model, optimizer = _prepared(f"fsdp{version}")
    _train(accelerator, model, optimizer, range(STEPS))
    accelerator.save_state(folder, async_save=True)
    expected = _train(accelerator, model, optimizer, range(STEPS, 2 * STEPS))
    accelerator.wait_for_checkpoint()
    verify_checkpoint(folder)
    accelerator.load_state(folder)
    assert _train(accelerator, model, optimizer, range(STEPS, 2 * STEPS)) == expected


@pytest.mark.parametrize("version", [1, 2])
def test_saves_behind_the_training(tmp_path: Path, version: int) -> None:
    run_world(_saves_behind_the_training, 2, str(tmp_path / "checkpoint"), version)


def _refuses_another_model(folder: str) -> str:
    accelerator, _, _ = _prepared("fsdp2")
    accelerator.save_state(folder)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, **_engine("fsdp2"))
    model = accelerator.prepare(Tower(width=4))
    before = whole(model.embed.weight)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    assert torch.equal(whole(model.embed.weight), before)
    return str(caught.value)


def test_refuses_another_model(tmp_path: Path) -> None:
    for message in run_world(_refuses_another_model, 2, str(tmp_path / "checkpoint")):
        assert "other shapes" in message and "(16, 8) for (16, 4)" in message


def _saves_the_model(folder: str) -> None:
    accelerator, model, _ = _prepared("fsdp2")
    accelerator.save_model(model, folder, max_shard_size="1KB")


def test_saves_the_model(tmp_path: Path) -> None:
    run_world(_saves_the_model, 2, str(tmp_path))
    model = Tower(seed=5)
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Tower().parameters(), strict=True))
    assert model.head.weight is model.embed.weight


def _single_functions(folder: str, version: int, kind: str, use_dcp: bool) -> None:
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    accelerator, model, optimizer = _prepared(f"fsdp{version}")
    plugin = accelerator.state.fsdp_plugin
    plugin.set_state_dict_type(kind)
    _train(accelerator, model, optimizer, range(STEPS))
    save_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    expected = _train(accelerator, model, optimizer, range(STEPS, 2 * STEPS))
    load_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    assert _train(accelerator, model, optimizer, range(STEPS, 2 * STEPS)) == expected


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("kind", "use_dcp", "files"),
    [
        ("SHARDED_STATE_DICT", True, {"optimizer_0", "pytorch_model_fsdp_0"}),
        ("FULL_STATE_DICT", True, {"optimizer.bin", "pytorch_model_fsdp.bin"}),
        (
            "SHARDED_STATE_DICT",
            False,
            {f"{name}_rank{rank}.bin" for name in ("optimizer", "pytorch_model_fsdp") for rank in (0, 1)},
        ),
    ],
)
def test_single_functions(tmp_path: Path, version: int, kind: str, use_dcp: bool, files: set[str]) -> None:
    run_world(_single_functions, 2, str(tmp_path), version, kind, use_dcp)
    assert {path.name for path in tmp_path.iterdir()} == files


def _no_code_is_run(folder: str) -> str:
    accelerator, model, _ = _prepared("fsdp2")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    path = Path(folder, "pytorch_model_fsdp_0", ".metadata")
    if accelerator.is_main_process:
        path.write_bytes(pickle.dumps(print))
    accelerator.wait_for_everyone()
    from accelerate.utils import load_fsdp_model

    with pytest.raises(CheckpointError) as caught:
        load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder)
    return str(caught.value)


def test_no_code_is_run(tmp_path: Path) -> None:
    for message in run_world(_no_code_is_run, 2, str(tmp_path / "checkpoint")):
        assert "builtins.print" in message


def _micro_batches(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens_of(step, accelerator.process_index, accelerator.num_processes))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def _in_the_middle_of_a_window(folder: str, save: bool, name: str) -> list[float]:
    accelerator, model, optimizer = _prepared(name, seed=0 if save else 7)
    accelerator.gradient_accumulation_steps = 3
    if save:
        _micro_batches(accelerator, model, optimizer, range(5))  # two into the second window
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return _micro_batches(accelerator, model, optimizer, range(5, 10))


def test_in_the_middle_of_a_window(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = run_world(_in_the_middle_of_a_window, 2, folder, True, "fsdp2")[0]
    for processes, name in ((2, "fsdp2"), (4, "fsdp2"), (2, "ddp")):
        found = run_world(_in_the_middle_of_a_window, processes, folder, False, name)[0]
        assert found == pytest.approx(expected, abs=1e-5), (processes, name)
