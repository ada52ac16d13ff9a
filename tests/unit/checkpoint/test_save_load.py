"""Saving and loading on one process: what is written, what comes back, what is refused."""

from __future__ import annotations

import collections
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator
from accelerate.checkpoint import commit, layout
from accelerate.checkpoint.full_state import packed, read_gradients
from accelerate.checkpoint.layout import Manifest
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import Run, read_objects
from accelerate.checkpoint.save import own_parts
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
    verify_checkpoint,
)
from accelerate.devices import CPU
from accelerate.errors import CheckpointError
from accelerate.io import blocks, disk, host_memory
from accelerate.io.read_tensors import read_file
from accelerate.io.stored_tensors import write_safetensors
from accelerate.utils import ProjectConfiguration
from tests.harness.torch_features import refuses_defaultdict
from tests.unit.accelerator.toys import Net, loader, optimizer_values, weights

WIDEST = torch.complex64


class Counter:
    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Training:
    """A small run, with something of everything."""

    def __init__(self, seed: int = 0, **kwargs: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **kwargs)
        net, other = Net(seed), Net(seed + 1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.model, self.other, self.optimizer, self.scheduler, self.batches = self.accelerator.prepare(
            net, other, optimizer, scheduler, loader()
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.ones(2, 4)).sum())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.counter.value += 1

    def state(self) -> list[Any]:
        return [
            weights(self.model).tolist(),
            weights(self.other).tolist(),
            optimizer_values(self.optimizer).tolist(),
            self.scheduler.get_last_lr(),
            self.counter.value,
        ]


class Extra(nn.Linear):
    """Has something beside its weights."""

    def get_extra_state(self) -> dict[str, int]:
        return {"value": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if state["value"] != 2:
            raise ValueError("too old")


class Choosy(nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        super().load_state_dict(*args, **kwargs)
        raise ValueError("too old")


def refuse(*args: Any) -> None:
    raise ValueError("too old")


@pytest.mark.parametrize("safe", [True, False])
def test_everything_comes_back(tmp_path: Path, safe: bool) -> None:
    run = Training()
    run.step()
    expected = run.state()
    assert run.accelerator.save_state(tmp_path / "x", safe_serialization=safe) == tmp_path / "x"
    draws = [random.random(), np.random.rand(), torch.rand(1).item()]
    other = Training(seed=5)
    assert other.state() != expected
    other.accelerator.load_state(tmp_path / "x")
    assert other.state() == expected
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == draws
    kind = ["model.safetensors", "model_1.safetensors"] if safe else ["pytorch_model.bin", "pytorch_model_1.bin"]
    files = [*kind, "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"]
    assert sorted(os.listdir(tmp_path / "x")) == sorted([*files, "accelerate_manifest.json"])
    assert os.listdir(tmp_path) == ["x"]


def test_the_same_folder_again_and_what_else_is_in_it(tmp_path: Path) -> None:
    run = Training()
    folder = tmp_path / "x"
    run.accelerator.save_state(folder, safe_serialization=False)
    (folder / "notes.txt").write_text("mine")
    (folder / "sub").mkdir()
    run.step()
    expected = run.state()
    run.accelerator.save_state(folder)
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "sub").is_dir()
    assert not (folder / "pytorch_model.bin").exists()  # of the one before
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    run.step()
    run.accelerator.load_state(folder)
    assert run.state() == expected


def test_the_working_folder_is_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Training()
    run.accelerator.save_state(".")
    run.accelerator.save_state(".")
    assert (tmp_path / "model.safetensors").exists()
    run.accelerator.load_state(".")


def test_automatic_names(tmp_path: Path) -> None:
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    run = Training(project_config=config)
    for number in range(3):
        run.step()
        assert run.accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{number}"
    assert run.accelerator.save_iteration == 3
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    config.iteration = 2
    with pytest.raises(ValueError, match="checkpoint_2 exists already: if that run is over, load its last one first"):
        run.accelerator.save_state()
    expected = run.state()
    fresh = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    other = Training(seed=3, project_config=fresh)
    other.accelerator.load_state()
    assert other.state() == expected
    assert other.accelerator.save_state().name == "checkpoint_3"
    other.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_2")


def test_a_new_run_beside_checkpoints_of_an_older_one(tmp_path: Path) -> None:
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=1, iteration=7)
    run = Training(project_config=config)
    run.accelerator.save_state()
    config.iteration = 0
    run.accelerator.save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]  # what was just saved stays, whatever its number


def test_ten_comes_after_nine(tmp_path: Path) -> None:
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=1, iteration=9)
    run = Training(project_config=config)
    run.accelerator.save_state()
    run.step()
    run.accelerator.save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_10"]
    expected = run.state()
    run.step()
    run.accelerator.load_state()
    assert run.state() == expected


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = Training()
    with pytest.raises(ValueError, match="pass `output_dir`"):
        run.accelerator.save_state()
    with pytest.raises(ValueError, match="pass `input_dir`"):
        run.accelerator.load_state()
    with pytest.raises(ValueError, match=r"There is no folder"):
        run.accelerator.load_state(tmp_path / "nothing")
    with pytest.raises(TypeError, match=r"^input_dir is 3, an int: pass the path of a folder\.$"):
        run.accelerator.load_state(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^output_dir is 3, an int: pass the path of a folder\.$"):
        run.accelerator.save_state(3)  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"neither accelerate_manifest.json nor random_states_0.pkl"):
        run.accelerator.load_state(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"was given int: .* need both"):
        run.accelerator.register_for_checkpointing(3)
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    other = Training(project_config=config)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*checkpoints: pass the path of one"):
        other.accelerator.load_state()


def test_hooks(tmp_path: Path) -> None:
    run = Training()
    seen: list[Any] = []

    def save_hook(models: list[Any], states: list[Any], folder: str) -> None:
        seen.append((len(models), list(states[0]), Path(folder).name))
        Path(folder, "extra").mkdir()
        torch.save(states.pop(), Path(folder, "extra", "other.pt"))

    def load_hook(models: list[Any], folder: str) -> None:
        model = models.pop()
        model.load_state_dict(torch.load(Path(folder, "extra", "other.pt")))
        seen.append(folder)

    handle = run.accelerator.register_save_state_pre_hook(save_hook)
    loading = run.accelerator.register_load_state_pre_hook(load_hook)
    run.step()
    expected = run.state()
    run.accelerator.save_state(tmp_path / "x")
    assert not (tmp_path / "x" / "model_1.safetensors").exists()
    assert "extra/other.pt" in verify_checkpoint(tmp_path / "x")["files"]
    assert seen[0][:2] == (2, list(Net().state_dict())) and seen[0][2].startswith(".x.staging-")
    run.step()
    with torch.no_grad():
        run.other.first.weight.zero_()
    run.accelerator.load_state(tmp_path / "x")
    assert run.state() == expected and seen[1] == str(tmp_path / "x")
    handle.remove()
    loading.remove()
    run.accelerator.save_state(tmp_path / "x")
    assert not (tmp_path / "x" / "extra" / "other.pt").exists() and len(seen) == 2


def test_a_failing_hook_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    run = Training()
    run.accelerator.save_state(tmp_path / "x")
    expected = run.state()

    def fails(*_: Any) -> None:
        raise KeyError("mine")

    run.accelerator.register_save_state_pre_hook(fails)
    run.step()
    with pytest.raises(KeyError, match="mine"):
        run.accelerator.save_state(tmp_path / "x")
    assert not [name for name in os.listdir(tmp_path / "x") if name.startswith(".")]
    run.accelerator.load_state(tmp_path / "x")
    assert run.state() == expected


def damage(kind: str, path: Path) -> None:
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :])


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_damage_is_named_and_nothing_is_loaded(tmp_path: Path, kind: str) -> None:
    run = Training()
    run.step()
    run.accelerator.save_state(tmp_path / "x")
    names = [name for name in os.listdir(tmp_path / "x") if name != "accelerate_manifest.json"]
    assert len(names) == 6
    run.step()
    before = run.state()
    rng = torch.get_rng_state()
    for name in names:
        content = (tmp_path / "x" / name).read_bytes()
        damage(kind, tmp_path / "x" / name)
        for look in (run.accelerator.load_state, verify_checkpoint):
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
                look(tmp_path / "x")
            assert "\n" not in str(caught.value) and str(caught.value).endswith(
                ("another one.", "checkpoint.", "accelerate_manifest.json.")
            )
        assert run.state() == before and torch.equal(torch.get_rng_state(), rng)
        (tmp_path / "x" / name).write_bytes(content)
    run.accelerator.load_state(tmp_path / "x")
    damage("truncated", tmp_path / "x" / "accelerate_manifest.json")
    with pytest.raises(CheckpointError, match=r"accelerate_manifest\.json is damaged"):
        run.accelerator.load_state(tmp_path / "x")


def test_a_project_without_a_checkpoint(tmp_path: Path) -> None:
    run = Training(project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint in .*: pass the path of one") as caught:
        run.accelerator.load_state()
    assert isinstance(caught.value, CheckpointError)


def test_the_newest_complete_one_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Training(project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    states = []
    for _ in range(3):
        run.step()
        states.append(run.state())
        run.accelerator.save_state()
    damage("flipped", tmp_path / "checkpoints" / "checkpoint_2" / "model.safetensors")
    (tmp_path / "checkpoints" / "checkpoint_7").mkdir()
    run.accelerator.load_state()
    assert run.state() == states[1]
    said = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(said) == 2 and "checkpoint_7" in said[0] and "checkpoint_2/model.safetensors is damaged" in said[1]
    for number in range(2):
        damage("missing", tmp_path / "checkpoints" / f"checkpoint_{number}" / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"None of the checkpoints in .* is complete"):
        run.accelerator.load_state()
    assert run.state() == states[1]


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run = Training()
    run.accelerator.save_state(tmp_path / "x")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net(hidden=16))
    accelerator.register_for_checkpointing(Counter())
    before = weights(model)
    with pytest.raises(CheckpointError, match=r"not those of this Net \(.*other shapes: .*first.weight \(8, 4\) for"):
        accelerator.load_state(tmp_path / "x")
    assert torch.equal(weights(model), before)
    single = Accelerator(cpu=True)
    single.register_for_checkpointing(Counter())
    net = Net()
    single.prepare(net, torch.optim.AdamW([{"params": [p]} for p in net.parameters()]))
    with pytest.raises(CheckpointError, match=r"optimizer.bin belongs to an optimizer with groups of \[4\]"):
        single.load_state(tmp_path / "x")


# Those of torch that take dense gradients and parameters with two dimensions.
PLAIN_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)

STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "of a scheduler": lambda state: {"last_epoch": 3},
    "a list": lambda state: [1, 2],
    "groups that are a number": lambda state: state | {"param_groups": 3},
    "groups of numbers": lambda state: state | {"param_groups": [3]},
    "without states": lambda state: {"param_groups": state["param_groups"]},
    "states in a list": lambda state: state | {"state": [1]},
    "a number as state": lambda state: state | {"state": {**state["state"], 1: 5}},
    "a word as step": lambda state: state | {"state": {**state["state"], 1: {**state["state"][1], "step": "x"}}},
}


@pytest.mark.parametrize("kind", STATES)
def test_what_is_no_state_of_an_optimizer_is_refused_before_anything_changes(tmp_path: Path, kind: str) -> None:
    """As in a checkpoint without checksums: of a 1.x release."""
    run = Training()
    run.step()
    run.accelerator.save_state(tmp_path)
    (tmp_path / "accelerate_manifest.json").unlink()
    file = tmp_path / "optimizer.bin"
    torch.save(STATES[kind](torch.load(file)), file)
    run.step()
    before = run.state()
    with pytest.raises(CheckpointError, match=r"optimizer\.bin does not hold the state of an optimizer: load another"):
        run.accelerator.load_state(tmp_path)
    assert run.state() == before


class Listing(torch.optim.SGD):
    """Keeps a list for each parameter, which torch's own loading takes."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = [parameter.grad.clone(), torch.ones(2)]


def test_a_state_that_is_a_list(tmp_path: Path) -> None:
    accelerator = Accelerator()
    net = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, Listing(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    kept = optimizer.state[net.weight][0]
    accelerator.save_state(tmp_path)
    optimizer.state.clear()
    accelerator.load_state(tmp_path)
    assert torch.equal(optimizer.state[net.weight][0], kept)


class Signs(torch.optim.Optimizer):
    """As others write them: with what torch's class has, and no more; it keeps a count for all parameters."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("kind", np.bool_(True))
                state["mean"] = state.get("mean", 0.0) * 0.9 + parameter.grad.mean()
                parameter.sub_(group["lr"] * parameter.grad.sign() * state["mean"].abs() / self.state["steps"])


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=2, history_size=2)


OPTIMIZERS = [_lbfgs, Signs, *(getattr(torch.optim, name) for name in dir(torch.optim) if name in PLAIN_OPTIMIZERS)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_kind_of_optimizer_goes_on_where_it_was_saved(tmp_path: Path, kind: Any) -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    model, optimizer = accelerator.prepare(net, kind(net.parameters()))

    def step() -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.arange(8.0).view(2, 4)).square().mean()
            accelerator.backward(loss)
            return loss

        closure()
        optimizer.step(closure)
        return weights(model).clone()

    step()
    accelerator.save_state(tmp_path)
    expected = step()
    for _ in range(2):
        accelerator.load_state(tmp_path)
        assert torch.equal(step(), expected)


def test_names_may_differ_but_not_shapes(tmp_path: Path) -> None:
    run = Training()
    run.accelerator.save_state(tmp_path / "x")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net(seed=3))
    accelerator.register_for_checkpointing(Counter())
    model.extra = nn.Linear(2, 2)
    model.last = nn.Linear(8, 7)
    before = weights(model)
    with pytest.raises(CheckpointError, match=r"not those of this \w+ \(other shapes: .*last.weight"):
        accelerator.load_state(tmp_path / "x", strict=False)
    assert torch.equal(weights(model), before)
    del model.last
    accelerator.load_state(tmp_path / "x", strict=False)
    assert torch.equal(model.first.weight, run.model.first.weight)


def test_a_hook_loads_nothing_where_another_file_is_damaged(tmp_path: Path) -> None:
    run = Training()
    run.step()
    run.accelerator.save_state(tmp_path / "x")
    called: list[Any] = []
    run.accelerator.register_load_state_pre_hook(lambda models, folder: called.append(models.pop()))
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        content = (tmp_path / "x" / name).read_bytes()
        damage("flipped", tmp_path / "x" / name)
        with pytest.raises(CheckpointError, match="damaged"):
            run.accelerator.load_state(tmp_path / "x")
        (tmp_path / "x" / name).write_bytes(content)
    assert called == []
    run.accelerator.load_state(tmp_path / "x")
    assert called == [run.other]


def test_a_hook_loads_nothing_where_an_optimizer_does_not_fit(tmp_path: Path) -> None:
    run = Training()
    run.step()
    run.accelerator.save_state(tmp_path)
    other = Training(seed=5)
    other.accelerator.register_load_state_pre_hook(
        lambda models, folder: nn.init.zeros_(models.pop(0).first.weight)  # by itself
    )
    group = other.optimizer.optimizer.param_groups[0]
    group["params"], params = group["params"][:1], group["params"]
    before = weights(other.model)
    with pytest.raises(CheckpointError, match="optimizer with groups of"):
        other.accelerator.load_state(tmp_path)
    assert torch.equal(weights(other.model), before)
    group["params"] = params
    other.accelerator.load_state(tmp_path)
    assert not other.model.first.weight.any()
    assert torch.equal(optimizer_values(other.optimizer), optimizer_values(run.optimizer))


def test_a_scheduler_of_another_kind_leaves_the_weights(tmp_path: Path) -> None:
    run = Training()
    run.step()
    run.accelerator.save_state(tmp_path / "x")
    other = Training(seed=5)
    chain = torch.optim.lr_scheduler.ChainedScheduler
    other.accelerator._schedulers[0].scheduler = chain([other.scheduler.scheduler], other.optimizer.optimizer)
    before = [weights(other.model), optimizer_values(other.optimizer)]
    with pytest.raises(CheckpointError, match=r"scheduler.bin does not fit the ChainedScheduler .*KeyError"):
        other.accelerator.load_state(tmp_path / "x")
    after = [weights(other.model), optimizer_values(other.optimizer)]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["../mine", "/mine", "sub/../../mine", "link/mine"])
def test_a_manifest_says_nothing_of_other_folders(tmp_path: Path, name: str) -> None:
    """A replacement that was broken off deletes files of the older checkpoint: never any outside of it."""
    run = Training()
    folder = tmp_path / "x"
    run.accelerator.save_state(folder)
    run.accelerator.save_state(folder / ".accelerate-committed")
    (tmp_path / "mine").write_text("")
    (folder / "link").symlink_to(tmp_path)
    name = name if name != "/mine" else str(tmp_path / "mine")
    manifest = Manifest.read(folder)
    assert manifest is not None
    replace(manifest, files={**manifest.files, name: blocks.FileEntry(0, [])}).write(folder / layout.MANIFEST)
    if name == "link/mine":
        for look in (run.accelerator.load_state, run.accelerator.save_state):
            with pytest.raises(CheckpointError, match=r"link leads out of the checkpoint through a link"):
                look(folder)
    else:
        with pytest.raises(CheckpointError, match=r"mine' is not in its folder"):
            Manifest.read(folder)
        run.accelerator.load_state(folder)  # the new one
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize("kind", ["before", "after", "extra", "itself", "renamed", "optimizer"])
def test_a_refusal_halfway_leaves_all_as_it_was(tmp_path: Path, kind: str) -> None:
    def run() -> tuple[Training, Any]:
        training = Training(seed=5)
        special = training.accelerator.prepare({"extra": Extra, "itself": Choosy}.get(kind, nn.Linear)(2, 2))
        training.step()
        return training, special

    training, _ = run()
    training.accelerator.save_state(tmp_path, safe_serialization=False)
    training, special = run()
    training.step()
    tensors = [*special.parameters()]
    state = [*training.state(), weights(special).tolist(), torch.get_rng_state().tolist()]
    if kind == "before":
        special.register_load_state_dict_pre_hook(refuse)
    elif kind == "after":
        special.register_load_state_dict_post_hook(refuse)
    elif kind == "renamed":
        special.register_load_state_dict_pre_hook(lambda *args: args[1].update(other=args[1].pop("bias")))
    elif kind == "optimizer":
        training.optimizer.optimizer.register_load_state_dict_post_hook(refuse)
    with pytest.raises(CheckpointError, match="Missing key" if kind == "renamed" else "ValueError: too old") as caught:
        training.accelerator.load_state(tmp_path)
    assert "\n" not in str(caught.value)
    assert [*training.state(), weights(special).tolist(), torch.get_rng_state().tolist()] == state
    assert all(one is two for one, two in zip(special.parameters(), tensors, strict=True))


def test_new_parameters_are_taken_back(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path)
    model.register_load_state_dict_post_hook(refuse)
    tensors = [*model.parameters()]
    with pytest.raises(CheckpointError, match="too old"):
        accelerator.load_state(tmp_path, assign=True)
    assert all(one is two for one, two in zip(model.parameters(), tensors, strict=True))


def test_a_hook_that_removes_itself_is_called_once(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path)

    def double(*args: Any) -> None:
        handle.remove()
        model.weight.data.mul_(2)

    expected = model.weight.detach() * 2
    handle = model.register_load_state_dict_post_hook(double)
    accelerator.load_state(tmp_path)
    assert torch.equal(model.weight, expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_an_optimizer_of_its_own_finds_the_weights(tmp_path: Path, hooked: bool) -> None:
    seen = []

    class Looks(torch.optim.SGD):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            seen.extend(parameter.tolist() for parameter in self.param_groups[0]["params"])

    def run() -> tuple[Accelerator, Any]:
        accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
        return accelerator, accelerator.prepare(model, Looks(model.parameters(), lr=0.1))[0]

    accelerator, model = run()
    accelerator.save_state(tmp_path)
    other = run()[0]
    if hooked:
        other.register_load_state_pre_hook(lambda models, folder: None)
    other.load_state(tmp_path)
    assert seen == [parameter.tolist() for parameter in model.parameters()]


def test_an_optimizer_that_objects_after_a_change_of_its_groups(tmp_path: Path) -> None:
    class Changes(torch.optim.SGD):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.param_groups[0]["lr"] = state["param_groups"][0]["lr"]
            raise ValueError("too old")

    model = nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True)
    optimizer: Any = accelerator.prepare(model, Changes(model.parameters(), lr=0.1))[1]
    accelerator.save_state(tmp_path)
    optimizer.param_groups[0]["lr"] = 0.9
    with pytest.raises(CheckpointError, match="too old"):
        accelerator.load_state(tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.9


def test_other_numbers_of_registered_objects(tmp_path: Path) -> None:
    run = Training()
    run.accelerator.register_for_checkpointing(Counter(1))
    run.accelerator.save_state(tmp_path)
    for number, files in (
        (1, "custom_checkpoint_0.pkl, custom_checkpoint_1.pkl"),
        (3, "custom_checkpoint_2.pkl is missing"),
    ):
        other = Training(seed=5)
        other.accelerator.register_for_checkpointing(*(Counter(i) for i in range(1, number)))
        state = other.state()
        with pytest.raises(RuntimeError, match=rf"2 registered objects \({files}\), but {number} are"):
            other.accelerator.load_state(tmp_path)
        assert other.state() == state


def test_keywords(tmp_path: Path) -> None:
    run = Training()
    run.accelerator.save_state(tmp_path)
    for good in ({"map_location": "cpu"}, {"map_location": "on_device"}, {"map_location": None}, {"assign": True}):
        other = Training(seed=5)
        other.accelerator.load_state(tmp_path, **good)
        assert other.state() == run.state()
    other = Training(seed=5)
    called: list[Any] = []
    other.accelerator.register_load_state_pre_hook(lambda models, folder: called.append(folder))
    state = other.state()
    for bad in ({"map_location": "meta"}, {"stric": False}):
        with pytest.raises(TypeError, match=next(iter(bad))):
            other.accelerator.load_state(tmp_path, **bad)
    assert other.state() == state and called == []


def test_numbers_and_arrays_of_numpy(tmp_path: Path) -> None:
    run = Training()
    values = [np.float64(0.5), np.float32(2), np.int64(3), np.bool_(True), np.arange(3), np.array(["a"]), np.ones(2)]
    for value in values:
        run.counter.value = value
        run.accelerator.save_state(tmp_path)
        run.counter.value = 0
        run.accelerator.load_state(tmp_path)
        assert type(run.counter.value) is type(value) and np.array_equal(run.counter.value, value)
    run.counter.value = np.array([None])
    run.accelerator.save_state(tmp_path)  # nothing is lost: whoever trusts it can read it
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0.pkl contains numpy.*, which is neither"):
        run.accelerator.load_state(tmp_path)


class Color:
    """Not an enumeration: Python up to 3.11.3 writes the members of those as calls of `getattr`."""


PLAIN = [
    deque([1, torch.ones(2)], maxlen=3),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {"a": 2}),
    OrderedDict(a=1),
    collections.Counter("aab"),
    {1, 2},
    frozenset({1}),
    (1, 2.5, None, True, 1j, b"x"),
    datetime(2030, 1, 2, 3, tzinfo=timezone.utc),
    timedelta(seconds=1),
    date(2030, 1, 2),
    Path("a/b"),
    range(3),
]


@pytest.mark.parametrize("value", PLAIN, ids=[f"{type(value).__name__}{i}" for i, value in enumerate(PLAIN)])
def test_plain_types_of_python(tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(counter := Counter(value))
    for behind in (False, True):
        accelerator.save_state(tmp_path, async_save=behind)
        counter.value = 0
        accelerator.load_state(tmp_path)
        assert type(counter.value) is type(value)
        if isinstance(value, deque):
            assert counter.value[0] == 1 and counter.value[1].tolist() == [1, 1] and counter.value.maxlen == 3
        else:
            assert counter.value == value
    assert not caplog.records


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(deque([1]), id="deque"),
        pytest.param(defaultdict(int, a=1), id="defaultdict", marks=refuses_defaultdict),
    ],
)
def test_what_torch_never_allows_has_another_way(tmp_path: Path, value: Any) -> None:
    """Release 1.x wrote them as pickle does: made empty, and then filled."""
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(counter := Counter())
    accelerator.save_state(tmp_path)
    (tmp_path / "accelerate_manifest.json").unlink()
    torch.save({"value": value}, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"contains collections.* load it with `load_kwargs=.'weights_only'"):
        accelerator.load_state(tmp_path)
    accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})
    assert counter.value == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [(Color(), r"test_save_load\.Color"), (np.array([None]), r"numpy\.dtypes\.ObjectDType")],
    ids=["a class of the script", "an array of objects"],
)
def test_what_will_not_load_is_said_when_it_is_saved(
    tmp_path: Path, value: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Counter({"tensor": torch.ones(2), "value": value}))
    for _ in range(2):
        accelerator.save_state(tmp_path)
    [record] = caplog.records  # once
    expected = rf"custom_checkpoint_0.pkl.* Counter contains \S*{kind}.* load_state will not load"
    assert re.search(expected, record.message)
    assert "add_safe_globals" in record.message and "\n" not in record.message
    with pytest.raises(CheckpointError, match=rf"custom_checkpoint_0.pkl contains \S*{kind}"):
        accelerator.load_state(tmp_path)


def test_sparse_gradients(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Embedding(3, 2, sparse=True))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([1, 1])).sum() * 2)
    for behind in (False, True):
        accelerator.save_state(tmp_path, async_save=behind)
        accelerator.wait_for_checkpoint()
        for _ in range(2):
            model.weight.grad = None
            accelerator.load_state(tmp_path)
            # As it was: both rows of one index, which an optimizer for such gradients adds up itself.
            assert not model.weight.grad.is_coalesced() and model.weight.grad._indices().tolist() == [[1, 1]]
            assert model.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0]]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["archive", "before torch 1.6", "no file of torch"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    run = Training()
    folder = tmp_path / "x"
    run.accelerator.save_state(folder, safe_serialization=False)
    (folder / "accelerate_manifest.json").unlink()
    before = run.state()
    order = OrderedDict(a=torch.ones(1) if kind != "no file of torch" else 1)
    content = {"text": "text", "order": order, "again": ["text", Evil()]}
    names = ("pytorch_model.bin", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl")
    for name in (*names, "random_states_0.pkl"):
        good = (folder / name).read_bytes()
        if kind == "no file of torch":
            (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
        else:
            archive = kind == "archive"
            torch.save(content, folder / name, pickle_protocol=protocol, _use_new_zipfile_serialization=archive)
        with pytest.raises(CheckpointError, match=f"{name} contains posix.system, which is neither"):
            run.accelerator.load_state(folder)
        (folder / name).write_bytes(good)
    run.accelerator.load_state(folder)
    assert run.state() == before and not (tmp_path / "evil").exists()


@pytest.mark.parametrize("behind", [False, True])
def test_what_cannot_be_pickled_is_named(tmp_path: Path, behind: bool) -> None:
    run = Training()
    run.counter.value = threading.Lock()
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl cannot be written, .*cannot pickle '_thread"):
        run.accelerator.save_state(tmp_path / "x", async_save=behind)
        run.accelerator.wait_for_checkpoint()
    assert not list(tmp_path.iterdir())


ODD_TENSORS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "without contents": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage|deprecated)")
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_odd_tensors_in_objects(tmp_path: Path, kind: str, behind: bool) -> None:
    run = Training()
    run.counter.value = value = ODD_TENSORS[kind]()
    folder = run.accelerator.save_state(tmp_path / "x", async_save=behind)
    assert folder == tmp_path / "x"
    run.counter.value = None
    run.accelerator.load_state(folder)
    found = run.counter.value
    assert (found.layout, found.dtype, found.device) == (value.layout, value.dtype, value.device)
    if kind == "nested" or kind == "jagged":
        assert all(torch.equal(a, b) for a, b in zip(found.unbind(), value.unbind(), strict=True))
    elif kind == "quantized":
        assert torch.equal(found.dequantize(), value.dequantize())
    elif kind != "without contents":
        assert torch.equal(found.to_dense(), value.to_dense())


@pytest.mark.parametrize("kind", ["sparse", "sparse rows"])
@pytest.mark.filterwarnings("ignore:.*beta state")
def test_sparse_tensors_in_objects_where_torch_checks_them(tmp_path: Path, kind: str) -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        test_odd_tensors_in_objects(tmp_path, kind, behind=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4)


def test_tied_weights_are_stored_once_and_found_again(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    expected = weights(model)
    accelerator.save_state(tmp_path / "x")
    assert "b.weight" not in load_file(tmp_path / "x" / "model.safetensors")
    with torch.no_grad():
        model.a.weight.zero_()
    accelerator.load_state(tmp_path / "x")
    assert torch.equal(weights(model), expected) and model.b.weight is model.a.weight


@pytest.mark.parametrize("safe", [True, False])
def test_save_model(tmp_path: Path, safe: bool) -> None:
    from accelerate import load_checkpoint_in_model

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    suffix = "safetensors" if safe else "bin"
    stem = "model" if safe else "pytorch_model"
    accelerator.save_model(model, tmp_path, max_shard_size=100, safe_serialization=safe)
    names = [f"{stem}-0000{n}-of-00003.{suffix}" for n in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == sorted([*names, f"{stem}.{suffix}.index.json"])
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
    assert index["metadata"] == {"total_size": 224}
    assert index["weight_map"]["d.bias"] == names[2] and ("b.weight" in index["weight_map"]) == (not safe)
    other = Tied()
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert torch.equal(weights(other), weights(model))
    accelerator.save_model(model, tmp_path, safe_serialization=safe)
    assert os.listdir(tmp_path) == [f"{stem}.{suffix}"]
    third = Tied()
    load_checkpoint_in_model(third, str(tmp_path / f"{stem}.{suffix}"), dtype=torch.float64)
    torch.testing.assert_close(weights(third), weights(model))
    with pytest.raises(RuntimeError, match="it lacks"):
        load_checkpoint_in_model(nn.Linear(3, 3), tmp_path, strict=True)
    with pytest.raises(ValueError, match="as in '5GB'"):
        accelerator.save_model(model, tmp_path, max_shard_size="many")


def test_a_model_saved_into_a_checkpoint(tmp_path: Path) -> None:
    run = Training()
    run.accelerator.save_state(tmp_path)
    run.step()
    run.accelerator.save_model(run.model, tmp_path)
    verify_checkpoint(tmp_path)
    run.accelerator.load_state(tmp_path)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
)
def test_all_kinds_of_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    from accelerate.io.blocks import summed_up
    from accelerate.io.stored_tensors import write_safetensors

    tensors = {
        "odd": torch.arange(3).to(torch.uint8),
        "x": torch.arange(6).reshape(2, 3).to(dtype).t(),
        "scalar": torch.tensor(2.5),
        "none": torch.ones(0, 3),
    }
    entry = write_safetensors(tensors, tmp_path / "x.safetensors")
    stored = load_file(tmp_path / "x.safetensors")
    assert entry == summed_up(tmp_path / "x.safetensors")
    assert all(stored[name].dtype == value.dtype for name, value in tensors.items())
    for name, value in tensors.items():
        assert stored[name].shape == value.shape and stored[name].to(WIDEST).tolist() == value.to(WIDEST).tolist()


def test_the_functions_of_the_module(tmp_path: Path) -> None:
    run = Training()
    run.step()
    expected = run.state()
    a = run.accelerator
    states = [a.get_state_dict(model) for model in a._models]
    folder = save_accelerator_state(tmp_path / "x", states, a._optimizers, a._schedulers, a._dataloaders, 0, 7)
    assert folder == tmp_path / "x"
    save_custom_state(run.counter, folder)
    run.step()
    lists = (a._models, a._optimizers, a._schedulers, a._dataloaders)
    assert load_accelerator_state(folder, *lists, 0, map_location="cpu") == {"step": 7}
    load_custom_state(run.counter, folder)
    assert run.state() == expected
    with pytest.raises(TypeError, match="map_location is 'gpu'"):
        load_accelerator_state(folder, *lists, 0, map_location="gpu")


@pytest.mark.parametrize("step", [4, 100])
def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """However a file is cut into pieces, blocks and steps, it is the same, and the sums are those of its blocks."""
    from accelerate.io import blocks

    monkeypatch.setattr(blocks, "BLOCK", 10)
    monkeypatch.setattr(blocks, "STEP", step)
    content = os.urandom(95)
    for cuts in ([95], [3, 95], [10, 20, 95], [1, 2, 12, 13, 30, 77, 95], [0, 5, 5, 95]):
        parts = [content[start:end] for start, end in zip([0, *cuts[:-1]], cuts, strict=True)]
        pieces = [torch.frombuffer(bytearray(p), dtype=torch.uint8) if i % 2 and p else p for i, p in enumerate(parts)]
        entry = blocks.write_file(tmp_path / "x", pieces)
        assert (tmp_path / "x").read_bytes() == content
        assert entry == blocks.summed_up(tmp_path / "x") and len(entry.crc32) == 10
        places = [(at, torch.zeros(size, dtype=torch.uint8)) for at, size in ((2, 5), (9, 24), (40, 10), (77, 18))]
        read_file(tmp_path / "x", places, entry)
        assert all(bytes(found.tolist()) == content[at : at + len(found)] for at, found in places)
    for place in range(95):
        damaged = bytearray(content)
        damaged[place] ^= 4
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="x is damaged"):
            read_file(tmp_path / "x", places, entry)
        # Two that read it together compare half of it each.
        found = 0
        for rank in range(2):
            try:
                read_file(tmp_path / "x", places, entry, (rank, 2))
            except CheckpointError:
                found += 1
        assert found == 1


def test_copies_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_PART", 64)
    tensors = {
        "large": torch.rand(100),
        "other strides": torch.rand(20, 10).t(),
        "two bytes": torch.rand(50).bfloat16(),
        "complex": (numbers := torch.rand(30, dtype=torch.complex64)),
        "conjugated": numbers.conj(),
        "its imaginary part": numbers.imag,
        "the negative of it": numbers.conj().imag,
        "one": torch.tensor(True),
        "none": torch.empty(0),
    }
    memory = host_memory.HostMemory()
    for _ in range(2):  # the second time in the memory of the first
        with memory.one_save():
            copies = memory.copy(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(copies[name], tensor) and copies[name].dtype == tensor.dtype, name
            assert copies[name].data_ptr() != tensor.data_ptr() or name == "none"


@pytest.mark.parametrize("block", [8, 16, 104, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_other_strides_are_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int
) -> None:
    from accelerate.io import blocks

    monkeypatch.setattr(blocks, "BLOCK", block)
    numbers = torch.arange(120).to(dtype)
    tensors = {
        "plain": numbers,
        "transposed": numbers.view(12, 10).t(),
        "channels last": numbers.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one row": numbers.view(1, 10, 12).transpose(1, 2),
        "every third": numbers[::3],
        "expanded": numbers[:4].expand(3, 4),
        "expanded number": numbers[7].expand(5),
        "number": numbers[7],
        "nothing": numbers.view(12, 10).t()[:, :0],
    }
    write_safetensors(tensors, tmp_path / "x")
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("y", self.x.conj())
        self.register_buffer("z", self.y.imag)  # the negative of what is there


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("safe", [True, False])
def test_conjugates_are_other_values(tmp_path: Path, safe: bool, behind: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Conjugated())
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(tmp_path / "x", safe, async_save=behind)
    accelerator.save_model(model, tmp_path / "model", safe_serialization=safe)
    model.x.zero_()
    accelerator.load_state(tmp_path / "x")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    if safe:
        alone = load_file(tmp_path / "model" / "model.safetensors")
        assert all(torch.equal(value, expected[name]) for name, value in alone.items()) and len(alone) == 3


class Views(nn.Module):
    """Several names for parts of one piece of memory, two of them for the same part."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.rand(8)
        self.register_buffer("a", memory[:2])
        self.register_buffer("b", memory[:2])
        self.register_buffer("c", memory)


def test_parts_of_one_memory(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Views())
    expected = model.c.clone()
    accelerator.save_state(tmp_path / "x")
    model.c.zero_()
    accelerator.load_state(tmp_path / "x")
    assert torch.equal(model.c, expected)
    accelerator.save_model(model, tmp_path / "model", max_shard_size=32)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 40
    assert index["weight_map"] == {f: f"model-0000{i}-of-00002.safetensors" for i, f in ((1, "a"), (2, "c"))}


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    from accelerate.io import blocks

    content = torch.ones(3 * blocks.BLOCK, dtype=torch.uint8)
    entry = blocks.write_file(tmp_path / "x", [content])
    os.truncate(tmp_path / "x", blocks.BLOCK)
    with pytest.raises(CheckpointError, match="x is damaged"):
        read_file(tmp_path / "x", [(0, content)], entry)


AT_EXIT = """
import atexit, sys, threading, torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2048, 2048))  # five blocks of a file

def refuse(*args, **kwargs):
    raise RuntimeError("can't start new thread at interpreter shutdown")

@atexit.register
def last():
    # As Python 3.12.1 does; others refuse pools of threads, and end without waiting for a single one.
    threading._start_new_thread = threading._start_joinable_thread = refuse
    accelerator.save_state(sys.argv[1])
    accelerator.save_state(sys.argv[1])  # the files of the first are freed
    accelerator.load_state(sys.argv[1])
    accelerator.save_state(sys.argv[2], async_save=True)
    print("saved")
"""


def test_at_the_end_of_a_program(tmp_path: Path) -> None:
    """Where Python lets nobody start threads any more."""
    folders = [str(tmp_path / "x"), str(tmp_path / "y")]
    done = subprocess.run([sys.executable, "-c", AT_EXIT, *folders], capture_output=True, text=True)
    assert done.stdout == "saved\n", done.stderr
    for folder in folders:
        verify_checkpoint(folder)


def test_what_is_replaced_is_freed_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To give back the room of an old checkpoint takes time, for which nobody waits but a save that may need it."""
    monkeypatch.setattr(disk, "_WORTH_HOLDING", 1)
    close, go = disk._close, threading.Event()
    monkeypatch.setattr(disk, "_close", lambda descriptors: (go.wait(), close(descriptors)))

    def held() -> set[str]:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if os.path.lexists(link)]
        return {os.path.basename(path).split()[0] for path in found if path.endswith("(deleted)")}

    run = Training()
    run.accelerator.save_state(tmp_path / "x")
    run.step()
    run.accelerator.save_state(tmp_path / "x")
    verify_checkpoint(tmp_path / "x")
    assert {"model.safetensors", "optimizer.bin"} <= held()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        if (pid := os.fork()) == 0:  # a worker that goes on for long must not keep them
            os._exit(len(held() & {"model.safetensors", "optimizer.bin"}))
    assert os.waitpid(pid, 0)[1] == 0
    commit.prune([tmp_path / "x"], 0)
    assert os.listdir(tmp_path) == []
    waiting = threading.Thread(target=disk.wait_until_freed)
    waiting.start()
    assert waiting.is_alive()
    go.set()
    waiting.join()
    assert not held() & {"model.safetensors", "optimizer.bin"}


def test_the_mean_of_sparse_gradients(tmp_path: Path) -> None:
    one = torch.sparse_coo_tensor([[1]], [4.0], (3,), check_invariants=True)
    two = torch.sparse_coo_tensor([[2]], [2.0], (3,), check_invariants=True)
    for rank, gradient in enumerate((one, two)):
        write_safetensors(packed({"0.x": gradient}), tmp_path / layout.gradients(rank))
    _, found = read_gradients(
        Run(0, 1, Accelerator(cpu=True).state.device_kind, saved_ranks=2), CheckpointReader(tmp_path)
    )
    assert found["0.x"].layout == torch.sparse_coo and found["0.x"].to_dense().tolist() == [0, 2, 1]


def test_gradients_of_models_that_hooks_load(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = accelerator.prepare(nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False))
    accelerator.register_save_state_pre_hook(lambda models, states, folder: states.pop(0))
    accelerator.register_load_state_pre_hook(lambda models, folder: models.pop(0))
    with accelerator.accumulate(first, second):
        accelerator.backward((first(torch.ones(1, 2)) + 3 * second(torch.ones(1, 2))).sum())
    accelerator.save_state(tmp_path)
    expected = [model.weight.grad.tolist() for model in (first, second)]
    first.weight.grad = second.weight.grad = None
    accelerator.load_state(tmp_path)
    assert [model.weight.grad.tolist() for model in (first, second)] == expected


def test_loaded_before_anything_is_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    folder = accelerator.save_state(tmp_path / "x")
    accelerator.load_state(folder)
    assert not caplog.text
    Accelerator(cpu=True).load_state(folder)
    assert "x holds weights, but no model is prepared for them: call `load_state` after `prepare`." in caplog.text


@pytest.mark.parametrize("kinds", [(torch.optim.AdamW, torch.optim.SGD), (torch.optim.SGD, torch.optim.Adam)])
def test_the_state_of_another_kind_of_optimizer(tmp_path: Path, kinds: tuple[Any, Any]) -> None:
    made = []
    for kind in kinds:
        accelerator = Accelerator(cpu=True)
        model = Net()
        made.append((accelerator, *accelerator.prepare(model, kind(model.parameters(), lr=0.1))))
    made[0][0].save_state(tmp_path / "x")
    accelerator, model, optimizer = made[1]
    before = weights(model)
    with pytest.raises(
        CheckpointError, match=f"optimizer.bin belongs to another kind of optimizer than {kinds[1].__name__}"
    ):
        accelerator.load_state(tmp_path / "x")
    assert torch.equal(weights(model), before) and optimizer.param_groups[0].keys() >= optimizer.defaults.keys()


def test_groups_of_an_older_release_are_filled_up(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for name in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            group.pop(name, None)
    accelerator.save_state(tmp_path / "x")
    torch.save(state, tmp_path / "x" / "optimizer.bin")
    (tmp_path / "x" / layout.MANIFEST).unlink()
    accelerator.load_state(tmp_path / "x")


def test_one_object_more_than_was_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(tmp_path / "x")
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    with pytest.raises(CheckpointError, match=r"has no scheduler\.bin, because fewer objects were saved"):
        accelerator.load_state(tmp_path / "x")


def test_a_new_run_in_a_used_folder_is_noticed_before_anything_is_deleted(tmp_path: Path) -> None:
    def config() -> ProjectConfiguration:
        return ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)

    first = Training(project_config=config())
    for _ in range(4):
        first.accelerator.save_state()
    there = sorted(os.listdir(tmp_path / "checkpoints"))
    assert there == ["checkpoint_2", "checkpoint_3"]
    second = Training(seed=3, project_config=config())
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match="checkpoint_3 belongs to another run, but the next checkpoint of this run would be checkpoint_0",
        ):
            second.accelerator.save_state()
        assert sorted(os.listdir(tmp_path / "checkpoints")) == there
    second.accelerator.project_configuration.iteration = 7
    expected = second.state()
    assert second.accelerator.save_state().name == "checkpoint_7"
    third = Training(seed=4, project_config=config())
    third.accelerator.load_state()
    assert third.state() == expected
    assert third.accelerator.save_state().name == "checkpoint_8"


def test_the_newest_is_the_one_that_was_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one with the highest number, nor the one that a clock that was set back gives the latest time."""
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=3)
    run = Training(project_config=config)
    folder = tmp_path / "checkpoints"
    run.accelerator.save_state()
    run.step()
    monkeypatch.setattr(commit.time, "time", lambda: 1000.0)
    last = run.accelerator.save_state()
    expected = run.state()
    (folder / "checkpoint_0").rename(folder / "checkpoint_6")  # as another run might have left it
    assert commit.oldest_first(tmp_path) == [folder / "checkpoint_6", last]
    fresh = Training(seed=3, project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    fresh.accelerator.load_state()
    assert fresh.state() == expected
    # Those of 1.x releases say nothing: their numbers do.
    for number in (2, 9):
        shutil.copytree(last, folder / f"checkpoint_{number}")
        (folder / f"checkpoint_{number}" / layout.MANIFEST).unlink()
    order = [path.name for path in commit.oldest_first(tmp_path)]
    assert order == ["checkpoint_6", "checkpoint_9", "checkpoint_1", "checkpoint_2"]
    config.iteration = 10
    run.accelerator.save_state()
    assert sorted(os.listdir(folder)) == ["checkpoint_1", "checkpoint_10", "checkpoint_2"]


@pytest.mark.parametrize(
    ("state", "together"),
    [({"seen": [1, (2.0, None)], "of numpy": np.zeros(3, np.uint32)}, True), ({"seen": np.ones(2)}, False)],
)
def test_what_1_x_would_refuse_is_in_a_file_of_its_own(tmp_path: Path, state: Any, together: bool) -> None:
    run = Run(0, 1, CPU(), progress={"loaders": [{"dataset": state}]})
    for file in own_parts(run):
        file.write(tmp_path)
    assert (tmp_path / layout.progress(0)).exists() is not together
    found = read_objects(run, CheckpointReader(tmp_path)).progress
    assert found is not None
    np.testing.assert_equal(found["loaders"][0]["dataset"], state)


def test_a_folder_beside_automatic_names_is_a_warning(tmp_path: Path) -> None:
    run = Training(project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=1))
    with pytest.warns(UserWarning, match=r"given 'best', but automatic_checkpoint_naming=True names the folder: .*_0"):
        run.accelerator.save_state("best")
    run.accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]


def test_a_folder_that_is_not_a_checkpoint_but_near_one(tmp_path: Path) -> None:
    run = Training(project_config=ProjectConfiguration(tmp_path / "project", automatic_checkpoint_naming=True))
    run.accelerator.save_state()
    with pytest.raises(CheckpointError, match=r"its checkpoints are in .*project/checkpoints; pass one of them"):
        run.accelerator.load_state(tmp_path / "project")
    there = tmp_path / "project" / "checkpoints"
    with pytest.raises(CheckpointError, match=rf"its checkpoints are in {there}; pass one of them"):
        run.accelerator.load_state(there)
    with pytest.raises(ValueError, match=rf"checkpoint_0 \(did you mean `{there}/checkpoint_0`\?\): pass the folder"):
        run.accelerator.load_state("checkpoint_0")
    with pytest.raises(ValueError, match=rf"There is no folder best: .* Those of this project are in {there}\.$"):
        run.accelerator.load_state("best")
    run.accelerator.save_model(run.model, str(tmp_path / "weights"))
    with pytest.raises(CheckpointError, match="it has the weights of a model only; load them with"):
        run.accelerator.load_state(tmp_path / "weights")
