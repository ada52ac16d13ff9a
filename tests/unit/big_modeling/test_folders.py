"""Files of offloaded weights that are written anew, deleted or no longer found under their name while a model runs."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import disk_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.devices.staging import Job
from accelerate.offload import offloaded_weights
from accelerate.offload.offloaded_weights import OffloadedWeightsLoader, offload_state_dict

X = torch.ones(1, 4)
PLACES: dict[str, Any] = {"0": "cpu", "1": "disk"}


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def loaded(seed: int, file: str, folder: str | Path) -> nn.Module:
    state = net(seed).state_dict()
    save_file(state, file) if file.endswith("safetensors") else torch.save(state, file)
    with init_empty_weights():
        model = net(seed)
    return load_checkpoint_and_dispatch(model, file, device_map=PLACES, offload_folder=folder)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("way", ["disk", "dispatched", "loaded"])
def test_two_models_and_one_folder(way: str, tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        if way == "disk":
            return disk_offload(net(seed), tmp_path, "cpu")
        if way == "dispatched":
            return dispatch_model(net(seed), PLACES, offload_dir=tmp_path)
        return loaded(seed, str(tmp_path / f"{seed}.bin"), tmp_path)

    first = made(0)
    second = made(1)
    third = copy.deepcopy(first)
    for _ in range(2):
        assert torch.equal(first(X), net(0)(X))
        assert torch.equal(second(X), net(1)(X))
        assert torch.equal(third(X), net(0)(X))
    assert torch.equal(first.state_dict()["1.weight"], net(0).state_dict()["1.weight"])


def test_a_deleted_folder(tmp_path: Path) -> None:
    model = disk_offload(net(0), tmp_path / "off", "cpu")
    shutil.rmtree(tmp_path / "off")
    assert torch.equal(model(X), net(0)(X))


def test_a_deleted_checkpoint(tmp_path: Path) -> None:
    model = loaded(0, str(tmp_path / "m.safetensors"), tmp_path / "off")
    os.unlink(tmp_path / "m.safetensors")
    assert torch.equal(model(X), net(0)(X))


@pytest.mark.parametrize("file", ["m.bin", "m.safetensors"])
def test_relative_paths_and_another_folder_to_work_in(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = loaded(0, file, "off")
    plain = disk_offload(net(0), "plain", "cpu")
    again = OffloadedWeightsLoader(save_folder="off")
    monkeypatch.chdir("/")
    assert torch.equal(model(X), net(0)(X))
    assert torch.equal(plain(X), net(0)(X))
    assert torch.equal(again["1.weight"], net(0).state_dict()["1.weight"])


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = open_files()
    model = disk_offload(net(0), tmp_path, "cpu")
    model(X)
    assert open_files() == before


def test_staging_reads_the_file_it_was_told_of(tmp_path: Path) -> None:
    """Also when another has its name by now, or none."""
    offload_state_dict(tmp_path, {"w": torch.ones(8)})
    place = OffloadedWeightsLoader(save_folder=tmp_path).locate("w")
    for change in ("none", "new", "gone"):
        if change == "new":
            offload_state_dict(tmp_path, {"w": torch.zeros(8)})
        elif change == "gone":
            (tmp_path / "w.dat").unlink()
        out = torch.empty(8)
        assert _staged(place, out).tolist() == [1.0] * 8, change


def _staged(place: Any, out: torch.Tensor) -> torch.Tensor:
    content, job = bytearray(out.nbytes), Job()
    place.read(memoryview(content), 0, job.files)
    job.end()
    return torch.frombuffer(content, dtype=out.dtype)


class Watched(nn.Conv2d):
    seen: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight.stride()
        return super().forward(x)


def test_layouts_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Watched(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    expected = model(x)
    strides = model.seen
    disk_offload(model, tmp_path, "cpu")
    model.seen = ()
    assert torch.equal(model(x), expected)
    assert model.seen == strides


def test_a_model_on_disk_is_traced(tmp_path: Path) -> None:
    model = disk_offload(net(0), tmp_path, "cpu")
    assert torch.equal(torch.jit.trace(model, (X,))(X), net(0)(X))


@pytest.mark.parametrize("second", ["cpu", "disk"])
def test_models_that_are_mapped_from_one_file_are_apart(second: str, tmp_path: Path) -> None:
    first = loaded(0, str(tmp_path / "m.safetensors"), tmp_path / "off")
    with init_empty_weights():
        other = net(0)
    places = {"0": "cpu", "1": second}
    load_checkpoint_and_dispatch(other, tmp_path / "m.safetensors", device_map=places, offload_folder=tmp_path / "off")
    with torch.no_grad():
        other[0].weight.zero_()
        other.state_dict()["1.weight"].zero_()
    assert torch.equal(first(X), net(0)(X))


def test_of_very_many_files_the_last_are_looked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_weights, "_MOST_MAPPED", 2)
    model = disk_offload(net(0), tmp_path, "cpu")
    assert torch.equal(model(X), net(0)(X))
    kept = [place.file is not None for _, place in model[1]._hf_hook.weights_map.dataset._ranges.values()]  # type: ignore[index,union-attr]
    assert sorted(kept) == [False, False, True, True]
