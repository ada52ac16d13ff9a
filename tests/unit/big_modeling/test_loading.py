from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accelerate import (
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.big_modeling import reading
from accelerate.errors import CheckpointError
from accelerate.utils import OffloadedWeightsLoader, load_state_dict
from accelerate.utils.modeling import get_state_dict_offloaded_model
from tests.harness import run_world
from tests.unit.big_modeling.models import Net, saved

TOKENS = torch.arange(8)


def same(model: nn.Module, other: nn.Module) -> bool:
    states = [{name: value.cpu() for name, value in part.state_dict().items()} for part in (model, other)]
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][n], states[1][n]) for n in states[0])


def empty(**kwargs: Any) -> Net:
    with init_empty_weights():
        return Net(**kwargs)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    made = Net()
    made(TOKENS)  # so that the buffers of the norm are not those of a new one
    return made


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"blocks": "cpu", "": torch.device("cpu")}])
@pytest.mark.parametrize("start", [empty, Net])
def test_every_kind_of_checkpoint(
    model: Net, tmp_path: Path, safe: bool, shards: int, device_map: Any, start: Any
) -> None:
    folder = saved(model, tmp_path, safe, shards)
    found = start()
    assert load_checkpoint_in_model(found, folder, device_map, strict=True) is None
    assert same(found, model)
    assert found.head.weight is found.embed.weight
    file = next(folder.glob("*.index.json" if shards > 1 else "*.safetensors" if safe else "*.bin"))
    again = start()
    load_checkpoint_in_model(again, str(file), device_map, strict=True)
    assert same(again, model)
    assert torch.equal(again.eval()(TOKENS), model.eval()(TOKENS))


def test_pieces_and_buffers(model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that come in many pieces, and by way of buffers as they do for a GPU."""
    monkeypatch.setattr(reading, "PIECE", 24)
    folder = saved(model, tmp_path)
    found = empty()
    load_checkpoint_in_model(found, folder)
    assert same(found, model)

    way = reading._Way.__init__

    def by_buffers(self: Any, device: torch.device) -> None:
        way(self, device)
        self._in_memory = False

    monkeypatch.setattr(reading._Way, "__init__", by_buffers)
    found = Net()
    load_checkpoint_in_model(found, folder)
    assert same(found, model)
    found = empty()
    load_checkpoint_in_model(found, folder, {"": "cpu"}, dtype=torch.float64)
    assert torch.equal(found.embed.weight, model.embed.weight.double())


def test_without_a_map_tensors_stay_what_they_are(model: Net, tmp_path: Path) -> None:
    found = Net().double()
    before = dict(found.named_parameters())
    load_checkpoint_in_model(found, saved(model, tmp_path), dtype=torch.float16)
    assert all(value is before[name] for name, value in found.named_parameters())
    assert torch.equal(found.embed.weight, model.embed.weight.double())
    strided = nn.Linear(4, 4)
    strided.weight = nn.Parameter(torch.zeros(4, 4).t())
    load_checkpoint_in_model(strided, saved(model.blocks[0].first, tmp_path / "layer"))
    assert torch.equal(strided.weight, model.blocks[0].first.weight)


def test_dtypes(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path)
    found = empty()
    load_checkpoint_in_model(found, folder, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["norm"])
    assert found.embed.weight.dtype == torch.float16 and found.norm.weight.dtype == torch.float32
    assert found.norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(found.embed.weight, model.embed.weight.half())
    found = empty().to(torch.bfloat16)
    load_checkpoint_in_model(found, folder, {"": "cpu"})
    assert found.embed.weight.dtype == torch.bfloat16, "by default what the model has"


def test_a_loaded_model_can_be_changed_and_its_file_is_not(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path)
    found = empty()
    load_checkpoint_in_model(found, folder, {"": "cpu"})
    with torch.no_grad():
        found.embed.weight.zero_()
    assert torch.equal(load_file(folder / "model.safetensors")["embed.weight"], model.embed.weight)


def test_ties_follow_the_name_that_is_there(model: Net, tmp_path: Path) -> None:
    save_file({"head.weight": torch.ones(8, 4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for start in (Net, empty):
        for device_map in ({"": "cpu"}, None):
            found = start()
            load_checkpoint_in_model(found, tmp_path, device_map)
            assert found.embed.weight is found.head.weight and found.embed.weight.sum() == 32
    untied = Net(tied=False)
    with pytest.raises(RuntimeError, match=r"lacks blocks\.0\.first\.bias, .*, embed\.weight, norm\.bias"):
        load_checkpoint_in_model(untied, tmp_path, strict=True)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_names_that_do_not_fit(model: Net, tmp_path: Path, device_map: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = {name: value.clone() for name, value in load_file(saved(model, tmp_path) / "model.safetensors").items()}
    del state["norm.bias"]
    save_file({**state, "more": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = Net()
    before = {name: value.clone() for name, value in found.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"is not of this Net, it lacks norm\.bias and has more besides: give"):
        load_checkpoint_in_model(found, tmp_path, device_map, strict=True)
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items()), "nothing was loaded"
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(found, tmp_path, device_map)
    assert "lacks norm.bias and has more besides" in caplog.text
    assert torch.equal(found.norm.bias, before["norm.bias"]) and torch.equal(found.embed.weight, model.embed.weight)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_shapes_that_do_not_fit(model: Net, tmp_path: Path, device_map: Any) -> None:
    folder = saved(model, tmp_path)
    found = Net()
    found.norm = nn.BatchNorm1d(5)
    with pytest.raises(ValueError, match=r"norm\.bias has shape \(4,\) there and \(5,\) here; .*norm\.weight has"):
        load_checkpoint_in_model(found, folder, device_map)


def test_maps_that_do_not_fit(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path)
    found = empty()
    with pytest.raises(ValueError, match=r"no device for norm\.\w+, .*: add them, a module"):
        load_checkpoint_in_model(found, folder, {"embed": "cpu", "head": "cpu", "blocks": "cpu"})
    with pytest.raises(ValueError, match="names the device 'gpu', which there is none of"):
        load_checkpoint_in_model(found, folder, {"": "gpu"})
    assert all(parameter.is_meta for parameter in found.parameters())


def test_the_disk(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path / "weights")
    device_map = {"embed": "cpu", "head": "cpu", "blocks": "disk", "norm": "disk"}
    with pytest.raises(ValueError, match="puts blocks, norm on disk: give an offload_folder"):
        load_checkpoint_in_model(empty(), folder, device_map)
    found = empty()
    load_checkpoint_in_model(found, folder, device_map, tmp_path / "disk")
    assert os.listdir(tmp_path / "disk") == ["index.json"], "the weights stay in their files"
    assert found.blocks[0].first.weight.is_meta and found.norm.weight.is_meta and not found.norm.running_mean.is_meta
    index = json.loads((tmp_path / "disk" / "index.json").read_text())
    assert set(index) == {name for name, value in found.state_dict().items() if value.is_meta}
    weights = OffloadedWeightsLoader(save_folder=tmp_path / "disk")
    assert torch.equal(weights["blocks.1.first.weight"], model.blocks[1].first.weight)
    found = empty()
    load_checkpoint_in_model(found, folder, device_map, tmp_path / "both", dtype=torch.float16, offload_buffers=True)
    weights = OffloadedWeightsLoader(save_folder=tmp_path / "both")
    assert found.norm.running_mean.is_meta and found.norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(weights["norm.running_mean"], model.norm.running_mean.half())


def test_the_disk_from_a_file_of_torch(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path / "weights", safe=False)
    found = empty()
    load_checkpoint_in_model(found, folder, {"blocks": "disk", "": "cpu"}, tmp_path / "disk", offload_state_dict=True)
    assert (tmp_path / "disk" / "blocks.0.first.weight.dat").stat().st_size == 64
    weights = OffloadedWeightsLoader(save_folder=tmp_path / "disk")
    assert torch.equal(weights["blocks.2.second.weight"], model.blocks[2].second.weight)


@pytest.mark.parametrize("safe", [True, False])
def test_loaded_and_dispatched(model: Net, tmp_path: Path, safe: bool) -> None:
    folder = saved(model, tmp_path / "weights", safe, shards=2)
    found = load_checkpoint_and_dispatch(
        empty(),
        folder,
        device_map={
            "embed": "cpu",
            "head": "cpu",
            "blocks.0": "cpu",
            "blocks.1": "disk",
            "blocks.2": "disk",
            "norm": "cpu",
        },
        offload_folder=tmp_path / "disk",
    ).eval()
    assert torch.equal(found(TOKENS), model.eval()(TOKENS))
    state = get_state_dict_offloaded_model(found)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def test_too_little_memory(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path)
    with pytest.raises(ValueError, match=r"This Net needs 636 bytes, .* cpu has 400, so that \d+ bytes are left over"):
        load_checkpoint_and_dispatch(empty(), folder, device_map="auto", max_memory={"cpu": 400})


def test_weights_of_one_file(model: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for safe, name in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        saved(model, tmp_path, safe)
        for device_map in (None, {"": "cpu"}, {"embed": "cpu", "blocks": "disk"}):
            found = load_state_dict(tmp_path / name, device_map)
            assert set(found) == set(model.state_dict()) - {"head.weight"}
            assert all(torch.equal(value, model.state_dict()[key]) for key, value in found.items())
    save_file({"a": torch.ones(1)}, tmp_path / "plain.safetensors")
    with caplog.at_level(logging.WARNING):
        assert load_state_dict(tmp_path / "plain.safetensors")["a"] == 1
    assert "does not say which library" in caplog.text
    save_file({"a": torch.ones(1)}, tmp_path / "odd.safetensors", metadata={"format": "odd"})
    with pytest.raises(OSError, match="the format 'odd'"):
        load_state_dict(tmp_path / "odd.safetensors")


def test_all_dtypes_of_the_format(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.uint8, torch.bool, torch.complex64)
    weights = {f"w{number}": torch.tensor([[0.0, 1.0, 2.0]]).to(dtype) for number, dtype in enumerate(dtypes)}
    weights |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3.0)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for device_map in (None, {"": "cpu"}):
        module = nn.Module()
        for name, value in weights.items():
            module.register_buffer(name, torch.zeros_like(value))
        load_checkpoint_in_model(module, tmp_path, device_map, strict=True)
        for name, value in weights.items():
            found = getattr(module, name)
            assert found.dtype == value.dtype and torch.equal(found.to(torch.complex64), value.to(torch.complex64)), (
                name
            )


def test_files_that_cannot_be_read(model: Net, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no weights"):
        load_checkpoint_in_model(Net(), tmp_path)
    file = saved(model, tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"has \d+ bytes and should have \d+"):
        load_checkpoint_in_model(Net(), tmp_path)
    for damaged in (b"", b"\xff" * 64, whole[:8] + b"}" + whole[9:]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint_in_model(Net(), tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        load_state_dict(tmp_path / "none.safetensors")
    file.unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing"):
        load_checkpoint_in_model(Net(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint_in_model(Net(), tmp_path)
    torch.save([1, 2], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_checkpoint_in_model(Net(), tmp_path / "list.bin")


def test_an_error_while_reading_is_told(model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(model, tmp_path)

    def fail(*_: Any) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        load_checkpoint_in_model(Net(), folder)


def load_from_first(folder: str) -> tuple[bool, bool]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = Net()
    load_checkpoint_in_model(model, folder if rank == 0 else "/nowhere", broadcast_from_rank0=True, strict=True)
    expected = torch.load(Path(folder, "expected.pt"), weights_only=True)
    right = all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    torch.distributed.destroy_process_group()
    return right, model.head.weight is model.embed.weight


def test_only_the_first_rank_reads(model: Net, tmp_path: Path) -> None:
    saved(model, tmp_path, shards=2)
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    assert run_world(load_from_first, 2, str(tmp_path)) == [(True, True)] * 2
