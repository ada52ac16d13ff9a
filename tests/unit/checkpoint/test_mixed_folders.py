"""Folders in which files of other checkpoints are, of this release or of the ones before it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpoint import layout
from accelerate.checkpointing import save_accelerator_state, save_custom_state, verify_checkpoint
from accelerate.errors import CheckpointError
from accelerate.io.safe_load import load
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from tests.unit.accelerator.toys import weights
from tests.unit.checkpoint.test_save_load import Training


def _fill(run: Training, value: float) -> None:
    for parameter in (*run.model.parameters(), *run.other.parameters()):
        parameter.data.fill_(value)
    run.counter.value = int(value)


def _values(run: Training) -> list[float]:
    return [*weights(run.model).unique().tolist(), *weights(run.other).unique().tolist(), run.counter.value]


def _save_as_1_15(run: Training, folder: Path) -> None:
    """As that release does: over what is there, by `torch.save`, without files of which it knows nothing."""
    new = run.accelerator.save_state(folder.with_name("by-1.15"))
    folder.mkdir(exist_ok=True)
    for path in new.iterdir():
        if path.suffix == ".safetensors":
            shutil.copy(path, folder / path.name)
        elif path.name != layout.MANIFEST:
            content = load(path)
            if path.name == layout.random_states(0):
                del content["progress"]
            torch.save(content, folder / path.name)
    shutil.rmtree(new)


def test_weights_of_another_kind_from_before(tmp_path: Path) -> None:
    run = Training()
    _fill(run, 1)
    _save_as_1_15(run, tmp_path / "x")
    _fill(run, 2)
    run.accelerator.save_state(tmp_path / "x", safe_serialization=False)
    assert (tmp_path / "x" / "model.safetensors").exists()  # as other files that were there
    _fill(run, 3)
    run.accelerator.load_state(tmp_path / "x")
    assert _values(run) == [2, 2, 2]


def test_files_that_are_not_of_the_checkpoint(tmp_path: Path) -> None:
    run = Training()
    folder = run.accelerator.save_state(tmp_path / "x")
    for name in ("scheduler_1.bin", "optimizer_1.bin", "custom_checkpoint_1.pkl", "gradients_0.safetensors"):
        (folder / name).write_text("no file of the checkpoint")
    for name in (layout.model_shards(0), layout.optimizer_shards(0), layout.gradient_shards()):
        (folder / name).mkdir()
    run.accelerator.load_state(folder)
    for name in ("scheduler_1.bin", "custom_checkpoint_1.pkl"):
        objects = run.accelerator._schedulers if "scheduler" in name else run.accelerator._custom_objects
        objects.append(objects[0])
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            run.accelerator.load_state(folder)
        objects.pop()


@pytest.mark.parametrize("automatic", [False, True])
def test_a_folder_that_an_older_release_has_saved_to_since(tmp_path: Path, automatic: bool) -> None:
    run = Training(project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=automatic))
    _fill(run, 1)
    folder = run.accelerator.save_state(None if automatic else tmp_path / "x")
    shutil.copy(folder / layout.random_states(0), folder / layout.random_states(1))
    (folder / layout.gradients(0)).write_text("of the checkpoint before")
    _fill(run, 2)
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    _save_as_1_15(run, folder)
    (folder / layout.progress(0)).write_text("of the checkpoint before")
    assert (folder / layout.MANIFEST).exists()
    run.accelerator.project_configuration.automatic_checkpoint_naming = automatic
    _fill(run, 3)
    run.accelerator.load_state(None if automatic else folder)
    assert _values(run) == [2, 2, 2]
    assert set(verify_checkpoint(folder)) == {"files"}
    _fill(run, 4)
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    run.accelerator.save_state(folder)
    _fill(run, 5)
    run.accelerator.load_state(folder)
    assert _values(run) == [4, 4, 4] and verify_checkpoint(folder)["world_size"] == 1


@pytest.mark.parametrize(
    "states",
    [{"random_state": 1}, {"numpy_random_seed": ("MT19937", [1])}, {"torch_manual_seed": torch.zeros(3)}],
    ids=["python", "numpy", "torch"],
)
def test_random_states_that_do_not_fit_leave_all_as_it_was(tmp_path: Path, states: object) -> None:
    run = Training()
    _save_as_1_15(run, tmp_path / "x")
    torch.save(states, tmp_path / "x" / layout.random_states(0))
    _fill(run, 3)
    with pytest.raises(CheckpointError, match=r"random_states_0\.pkl does not contain random states"):
        run.accelerator.load_state(tmp_path / "x")
    assert _values(run) == [3, 3, 3]


def test_the_functions_of_the_module_write_over_a_checkpoint(tmp_path: Path) -> None:
    run = Training()
    accelerator, folder = run.accelerator, tmp_path / "x"
    accelerator.save_state(folder)
    _fill(run, 2)
    save_custom_state(run.counter, folder)
    _fill(run, 3)
    load = (accelerator.load_state, verify_checkpoint)
    for look in load:
        look(folder)
    assert run.counter.value == 2
    _fill(run, 4)
    states = [accelerator.get_state_dict(model) for model in (run.model, run.other)]
    save_accelerator_state(folder, states, [run.optimizer], [run.scheduler], [], 0, 0)
    _fill(run, 5)
    for look in load:
        look(folder)
    assert _values(run) == [4, 4, 2]


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = Training()
    assert run.accelerator.save_state("~/x") == tmp_path / "x"
    assert verify_checkpoint("~/x")["world_size"] == 1


def test_a_file_that_was_replaced_on_purpose_has_a_way_out(tmp_path: Path) -> None:
    run = Training()
    folder = run.accelerator.save_state(tmp_path / "x")
    content = (folder / "model.safetensors").read_bytes()
    for other in (content[:-4] + b"\0\0\0\0", content + b" "):
        (folder / "model.safetensors").write_bytes(other)
        with pytest.raises(
            CheckpointError, match=r"if you replaced the file on purpose, delete accelerate_manifest\.json"
        ):
            run.accelerator.load_state(folder)
    (folder / "model.safetensors").write_bytes(content[:-4] + b"\0\0\0\0")
    (folder / layout.MANIFEST).unlink()
    run.accelerator.load_state(folder)


@pytest.mark.parametrize("by_itself", [False, True], ids=["beside random states", "by itself"])
def test_where_a_loop_was_is_found_in_either_file(tmp_path: Path, by_itself: bool) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(exact_resume=True))
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
    for _ in loader:
        folder = accelerator.save_state(tmp_path / "x")
        break
    if by_itself:
        content = load(folder / layout.random_states(0))
        torch.save(content.pop("progress"), folder / layout.progress(0))
        torch.save(content, folder / layout.random_states(0))
        (folder / layout.MANIFEST).unlink()
    accelerator.load_state(folder)
    assert torch.cat(list(loader)).tolist() == [2, 3, 4, 5, 6, 7]
