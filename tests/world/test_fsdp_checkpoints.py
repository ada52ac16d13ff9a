"""Checkpoints of sharded models: saved by any engine on any number of processes, loaded by any other."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.checkpointing import verify_checkpoint
from accelerate.errors import CheckpointError
from accelerate.parallel.shards import whole
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import load_checkpoint_in_model
from tests.harness import run_world, world_outcomes
from tests.harness.memory import needs_peak, peak
from tests.unit.accelerator.toys import ALONE
from tests.world.crashing import kill_at
from tests.world.towers import Tower, loss_of, micro_batches, tokens_of

STEPS = 2


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
    if name == "flat-full":
        return {"fsdp_plugin": _plugin(1, "FULL_STATE_DICT")}
    if name in ("fsdp2", "fsdp2-by-hand"):
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


def _prepared(
    name: str, seed: int = 0, flat: bool = False, precision: str = "no", depth: int = 2, kind: Any = torch.optim.AdamW
) -> tuple[Accelerator, Any, Any]:
    """flat: one group of parameters, as flat ones cannot be told apart."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState(cpu=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **_engine(name))
    assert (accelerator.distributed_type == DistributedType.FSDP) == (name not in ("single", "ddp"))
    plain = Tower(seed=seed, depth=depth)
    plain.shift = Tower().shift  # which is not saved
    if name == "fsdp2-by-hand":
        fully_shard(plain, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    groups: Any = plain.parameters()
    if not flat:
        # Two groups, so that the order of parameters is not that of the model.
        weights = [p for n, p in plain.named_parameters() if "weight" in n]
        groups = [{"params": weights, "lr": 2e-2}, {"params": [p for n, p in plain.named_parameters() if "bias" in n]}]
    model, optimizer = accelerator.prepare(plain, kind(groups, lr=1e-2))
    return accelerator, model, optimizer


def _train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    return micro_batches(accelerator, model, optimizer, steps, accelerator.process_index, accelerator.num_processes)


def _save_all(folder: str, names: list[str], flat: bool, depth: int) -> list[float]:
    losses = []
    for name in names:
        accelerator, model, optimizer = _prepared(name, flat=flat, depth=depth)
        _train(accelerator, model, optimizer, range(STEPS))
        target = f"{folder}/{name}-{accelerator.num_processes}"
        accelerator.save_state(target)
        verify_checkpoint(target)
        losses = _train(accelerator, model, optimizer, range(STEPS, 2 * STEPS))
    return losses


def _load_all(folder: str, name: str, flat: bool, depth: int) -> dict[str, list[float]]:
    found = {}
    for path in sorted(Path(folder).iterdir()):
        accelerator, model, optimizer = _prepared(name, seed=7, flat=flat, depth=depth)
        accelerator.load_state(path)
        found[f"{path.name} -> {name}-{accelerator.num_processes}"] = _train(
            accelerator, model, optimizer, range(STEPS, 2 * STEPS)
        )
    return found


def _env(processes: int) -> dict[str, str | None]:
    return dict(ALONE) if processes == 1 else {}


def _save_and_load(
    folder: Path, save: dict[int, list[str]], load: dict[int, list[str]], flat: bool = False, depth: int = 2
) -> None:
    expected: list[float] = []
    for processes, names in save.items():
        found = run_world(_save_all, processes, str(folder), names, flat, depth, env=_env(processes))
        expected = expected or found[0]
        assert found[0] == pytest.approx(expected, abs=1e-5)
    for processes, names in load.items():
        for name in names:
            (losses, *_) = run_world(_load_all, processes, str(folder), name, flat, depth, env=_env(processes))
            assert len(losses) == sum(map(len, save.values()))
            for way, values in losses.items():
                assert values == pytest.approx(expected, abs=1e-5), way


def test_any_engine_loads_what_any_engine_saved(tmp_path: Path) -> None:
    _save_and_load(tmp_path, SAVE, LOAD, depth=1)  # one block, as there are many ways


def test_flat_parameters(tmp_path: Path) -> None:
    save, load = ["flat", "flat-full", "unsharded"], ["flat", "unsharded", "fsdp2", "fsdp1", "ddp"]
    _save_and_load(tmp_path, {1: ["single"], 2: save}, {1: ["single"], 2: load}, flat=True)


def _loads_one_count_of_steps(folder: str) -> list[set[float]]:
    accelerator, model, optimizer = _prepared("ddp")
    _train(accelerator, model, optimizer, range(1))
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        Path(folder, "accelerate_manifest.json").unlink()
        content = torch.load(Path(folder, "optimizer.bin"))
        count = torch.tensor(1.0)
        for state in content["state"].values():
            assert state["step"] == count
            state["step"] = count
        torch.save(content, Path(folder, "optimizer.bin"))
    accelerator.wait_for_everyone()
    counts = []
    for name in ("ddp", "fsdp2", "fsdp1"):
        accelerator, model, optimizer = _prepared(name)
        accelerator.load_state(folder)
        _train(accelerator, model, optimizer, range(1))
        counts.append({state["step"].item() for state in optimizer.state.values()})
    return counts


def test_one_count_of_steps_for_several_parameters(tmp_path: Path) -> None:
    """As FSDP 1 keeps it of those that are flattened together, and older checkpoints have it."""
    assert run_world(_loads_one_count_of_steps, 2, str(tmp_path)) == [[{2.0}] * 3] * 2


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


def _hook_that_fails_behind_the_training(folder: str, version: int) -> str:
    """Before anything is gathered: nobody waits in a collective for the one that has failed."""
    accelerator, model, optimizer = _prepared(f"fsdp{version}-full")
    _train(accelerator, model, optimizer, range(1))

    def hook(*args: Any) -> None:
        if accelerator.process_index == 1:
            raise ValueError("not today")

    handle = accelerator.register_save_state_pre_hook(hook)
    with pytest.raises((CheckpointError, ValueError), match="not today") as caught:
        accelerator.save_state(folder, async_save=True)
    assert not Path(folder).exists()
    handle.remove()
    accelerator.save_state(folder, async_save=True)
    accelerator.wait_for_checkpoint()
    verify_checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize("version", [1, 2])
def test_a_hook_that_fails_on_one_rank_behind_the_training(tmp_path: Path, version: int) -> None:
    run_world(_hook_that_fails_behind_the_training, 2, str(tmp_path / "checkpoint"), version)


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


def _refuses_another_layer(folder: str, version: int) -> str:
    """Which comes after others that fit, and these are as they were, too."""
    accelerator, _, _ = _prepared(f"fsdp{version}")
    accelerator.save_state(folder)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, **_engine(f"fsdp{version}"))
    tower = Tower(seed=7)
    tower.blocks[1].up, tower.blocks[1].down = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)
    model = accelerator.prepare(tower)
    before = accelerator.get_state_dict(model)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder, strict=False)
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value)


@pytest.mark.parametrize("version", [1, 2])
def test_refuses_other_shapes_also_where_names_may_differ(tmp_path: Path, version: int) -> None:
    for message in run_world(_refuses_another_layer, 2, str(tmp_path / "checkpoint"), version):
        assert "other shapes" in message and "(16, 8) for (4, 8)" in message, message


def _refuses_another_optimizer(folder: str, version: int) -> str:
    accelerator, model, optimizer = _prepared(f"fsdp{version}")
    _train(accelerator, model, optimizer, range(1))
    accelerator.save_state(folder)
    accelerator, model, optimizer = _prepared(f"fsdp{version}", seed=7, flat=True)
    before = accelerator.get_state_dict(model)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value)


@pytest.mark.parametrize("version", [1, 2])
def test_another_optimizer_leaves_the_model_as_it_was(tmp_path: Path, version: int) -> None:
    for message in run_world(_refuses_another_optimizer, 2, str(tmp_path / "checkpoint"), version):
        assert "belongs to an optimizer with groups of" in message, message


def _refuses_another_kind_of_optimizer(folder: str, name: str) -> list[str]:
    """Between Adam and SGD; returns what was said both ways."""
    kinds = [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)]
    said = []
    for number, (saver, loader) in enumerate(permutations(kinds)):
        accelerator, model, optimizer = _prepared(name, kind=saver)
        _train(accelerator, model, optimizer, range(1))
        accelerator.save_state(f"{folder}/{number}")
        accelerator, model, optimizer = _prepared(name, seed=7, kind=loader)
        before, settings = accelerator.get_state_dict(model), set(optimizer.param_groups[0])
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_state(f"{folder}/{number}")
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert set(optimizer.param_groups[0]) == settings
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("name", ["fsdp1", "fsdp1-full", "fsdp2", "fsdp2-full"])
def test_another_kind_of_optimizer_is_refused(tmp_path: Path, name: str) -> None:
    for of_adam, of_sgd in run_world(_refuses_another_kind_of_optimizer, 2, str(tmp_path), name):
        assert "belongs to another kind of optimizer than SGD: it lacks dampening, momentum; create" in of_adam
        assert "belongs to another kind of optimizer than AdamW: it lacks " in of_sgd and "betas, eps" in of_sgd


def _refuses_on_one_rank(folder: str, version: int, what: str) -> str:
    accelerator, model, optimizer = _prepared(f"fsdp{version}")
    accelerator.save_state(folder)
    _train(accelerator, model, optimizer, range(1))
    before = accelerator.get_state_dict(model)

    def check(*args: Any) -> None:
        if accelerator.process_index == 1:
            raise ValueError("not today")

    if what == "model":
        accelerator.unwrap_model(model).register_load_state_dict_post_hook(check)
    else:
        optimizer.optimizer.register_load_state_dict_pre_hook(check)
    with pytest.raises(CheckpointError, match="not today") as caught:
        accelerator.load_state(folder)
    if (version, what) != (1, "model"):
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value)


@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize("version", [1, 2])
def test_what_refuses_on_one_rank_leaves_all_as_it_was_or_says_so(tmp_path: Path, version: int, what: str) -> None:
    for message in run_world(_refuses_on_one_rank, 2, str(tmp_path / "checkpoint"), version, what):
        # A model that fails in its middle is left unsharded by version 1.
        assert ("was partly loaded before it failed" in message) == ((version, what) == (1, "model"))
        assert "\n" not in message


def _damaged() -> str:
    """Each process has a disk of its own, and the piece of the second one has changed there."""
    accelerator, model, optimizer = _prepared("fsdp2")
    os.makedirs(f"disk-{accelerator.process_index}")
    accelerator.save_state("checkpoint")
    shutil.copytree("checkpoint", f"disk-{accelerator.process_index}/checkpoint")
    if accelerator.process_index == 1:
        path = Path("disk-1/checkpoint/pytorch_model_fsdp_0/__1_0.distcp")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    _train(accelerator, model, optimizer, range(1))
    before = whole(model.embed.weight)
    os.chdir(f"disk-{accelerator.process_index}")
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state("checkpoint")
    assert torch.equal(whole(model.embed.weight), before)
    return str(caught.value)


def test_damaged() -> None:
    for message in run_world(_damaged, 2):
        assert "__1_0.distcp" in message and "\n" not in message


def _no_space(folder: str) -> str:
    """One process cannot write its pieces: the others are told, and the checkpoint before stays."""
    accelerator, model, optimizer = _prepared("fsdp2")
    accelerator.save_state(folder)
    before = whole(model.embed.weight)
    _train(accelerator, model, optimizer, range(1))
    if accelerator.process_index == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    accelerator.wait_for_everyone()
    assert os.listdir(os.path.dirname(folder)) == ["checkpoint"]
    accelerator.load_state(folder)
    assert torch.equal(whole(model.embed.weight), before)
    return str(caught.value)


def test_no_space(tmp_path: Path) -> None:
    for message in run_world(_no_space, 2, str(tmp_path / "checkpoint")):
        assert message.startswith("Rank 1 could not write") and "raise the limit on the size" in message
        assert "\n" not in message


def _saves_until_killed(folder: str, victim: int, moment: int) -> None:
    """Saves twice to one folder; one process is killed at some moment of the second save."""
    accelerator, model, _ = _prepared("fsdp2")
    for number in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(number))
        if number == 1 and accelerator.process_index == victim:
            kill_at(moment)
        accelerator.save_state(folder)


def _what_is_left(folder: str) -> set[float]:
    accelerator, model, _ = _prepared("fsdp2")
    accelerator.load_state(folder)
    verify_checkpoint(folder)
    return {float(value) for parameter in model.parameters() for value in whole(parameter).unique()}


@pytest.mark.parametrize(("victim", "moment"), [(1, 1), (1, 2), (1, 3), (1, 4), (0, 1), (0, 10)])
def test_killed_while_saving(tmp_path: Path, victim: int, moment: int) -> None:
    folder = str(tmp_path / "checkpoint")
    outcomes = world_outcomes(_saves_until_killed, 2, folder, victim, moment, grace=0.1)
    assert outcomes[victim].signal == "SIGKILL"
    first, second = run_world(_what_is_left, 2, folder)
    assert first == second and len(first) == 1  # of one save, whole


def _saves_the_model(folder: str, names: list[str]) -> None:
    for name in names:
        accelerator, model, _ = _prepared(name, flat=True)
        accelerator.save_model(model, f"{folder}/{name}", max_shard_size="1KB")
        accelerator.save_model(model, f"{folder}/{name}-torch", max_shard_size="1KB", safe_serialization=False)
        with pytest.raises(CheckpointError if accelerator.process_index else ValueError, match="is a file"):
            accelerator.save_model(model, f"{folder}/{name}/model.safetensors.index.json")


def test_saves_the_model(tmp_path: Path) -> None:
    names = ["fsdp2", "fsdp1", "flat", "unsharded"]
    run_world(_saves_the_model, 2, str(tmp_path), names)
    for name in names + [f"{name}-torch" for name in names]:
        assert len(list((tmp_path / name).glob("*-of-*"))) > 1
        model = Tower(seed=5)
        load_checkpoint_in_model(model, tmp_path / name, strict=True)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Tower().parameters(), strict=True))
        assert model.head.weight is model.embed.weight


def _exports(folder: str) -> tuple[int, int]:
    """What an export adds at most; and how large the model is, in bytes."""
    accelerator, _, _ = _prepared("fsdp2")
    model = accelerator.prepare(Tower(width=256, depth=64))
    accelerator.save_model(model, f"{folder}/first", max_shard_size="4MB")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return peak(lambda: accelerator.save_model(model, f"{folder}/second", max_shard_size="4MB")), size


@needs_peak
def test_export_holds_one_file_at_a_time(tmp_path: Path) -> None:
    for added, size in run_world(_exports, 2, str(tmp_path)):
        assert size > 60 * 2**20 and added < 16 * 2**20, (added, size)


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


def _window_of(name: str, each: bool, seed: int) -> tuple[Accelerator, Any, Any]:
    """each: exchange gradients at every micro-batch."""
    accelerator, model, optimizer = _prepared(name, seed=seed, flat=True)
    accelerator.gradient_accumulation_steps = 3
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = each
    return accelerator, model, optimizer


def _save_inside(folder: str, names: list[str]) -> dict[str, list[float]]:
    found = {}
    for name in names:
        accelerator, model, optimizer = _window_of(name.removesuffix("-each"), name.endswith("-each"), 0)
        _train(accelerator, model, optimizer, range(5))  # two into the second window
        path = f"{folder}/{name}"
        accelerator.save_state(path)
        verify_checkpoint(path)
        found[name] = _train(accelerator, model, optimizer, range(5, 10))
        # One into the fourth, of which nothing may be left.
        accelerator.load_state(path)
        assert _train(accelerator, model, optimizer, range(5, 10)) == found[name], name
    return found


def _load_inside(ways: list[tuple[str, str]]) -> list[list[float]]:
    found = []
    for path, name in ways:
        accelerator, model, optimizer = _window_of(name.removesuffix("-each"), name.endswith("-each"), 7)
        accelerator.load_state(path)
        found.append(_train(accelerator, model, optimizer, range(5, 10)))
    return found


INSIDE = ["ddp", "fsdp2", "fsdp2-by-hand", "fsdp2-each", "flat", "flat-each", "fsdp1", "fsdp1-each", "unsharded"]


def test_in_the_middle_of_a_window(tmp_path: Path) -> None:
    (expected, _) = run_world(_save_inside, 2, str(tmp_path), INSIDE)
    folders = {name: str(tmp_path / name) for name in INSIDE}
    (again, _) = run_world(_load_inside, 2, [(path, name) for name, path in folders.items()])
    assert again == [expected[name] for name in INSIDE]  # to the last bit
    # Waiting on each process, and exchanged already.
    for processes, names in {1: ["single"], 2: ["ddp", "fsdp2"], 4: ["fsdp1"]}.items():
        ways = [(folders[saved], name) for name in names for saved in ("ddp", "fsdp1-each")]
        (found, *_) = run_world(_load_inside, processes, ways, env=_env(processes), timeout=120)
        for way, losses in zip(ways, found, strict=True):
            assert losses == pytest.approx(expected[Path(way[0]).name], abs=1e-5), way


def _counted_by_hand(folder: str) -> None:
    """A window that only the script knows of, whose gradients are not exchanged before its end."""

    def backward(step: int) -> None:
        accelerator.backward(loss_of(model, tokens_of(step, accelerator.process_index, accelerator.num_processes)))

    def rest() -> list[float]:
        backward(1)
        optimizer.step()
        optimizer.zero_grad()
        return _train(accelerator, model, optimizer, range(2, 4))

    for name in ("ddp", "fsdp2", "flat"):
        path = f"{folder}/{name}"
        accelerator, model, optimizer = _prepared(name, flat=True)
        with accelerator.no_sync(model):
            backward(0)
        accelerator.save_state(path)
        expected = rest()
        accelerator, model, optimizer = _prepared(name, seed=7, flat=True)
        accelerator.load_state(path)
        assert rest() == expected, name


def test_in_the_middle_of_a_window_that_a_script_counts(tmp_path: Path) -> None:
    run_world(_counted_by_hand, 2, str(tmp_path))


def _inside_in_low_precision(folder: str, precision: str) -> None:
    for name in ("fsdp2", "flat"):
        path = f"{folder}/{name}"
        for seed in (0, 7):
            accelerator, model, optimizer = _prepared(name, seed, True, precision)
            accelerator.gradient_accumulation_steps = 3
            if seed == 0:
                _train(accelerator, model, optimizer, range(5))
                accelerator.save_state(path)
                expected = _train(accelerator, model, optimizer, range(5, 10))
            else:
                accelerator.load_state(path)
                assert _train(accelerator, model, optimizer, range(5, 10)) == expected, name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_the_middle_of_a_window_in_low_precision(tmp_path: Path, precision: str) -> None:
    run_world(_inside_in_low_precision, 2, str(tmp_path), precision)
