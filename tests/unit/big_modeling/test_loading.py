from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accelerate import (
    cpu_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.big_modeling.weight_files import open_weights
from accelerate.devices.staging import HostTensor, PlainLane
from accelerate.errors import CheckpointError
from accelerate.io import read_tensors
from accelerate.utils import OffloadedWeightsLoader, load_state_dict
from accelerate.utils.modeling import get_state_dict_offloaded_model
from tests.harness import run_world
from tests.unit.big_modeling.interrupts import ControlC
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


def test_an_index_that_is_the_map_alone(model: Net, tmp_path: Path) -> None:
    [index] = saved(model, tmp_path, shards=3).glob("*.index.json")
    index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    for checkpoint in (tmp_path, index):
        found = empty()
        load_checkpoint_in_model(found, checkpoint, strict=True)
        assert same(found, model)


def test_pieces_and_buffers(model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that come in many pieces, and by way of buffers as they do for a GPU."""
    monkeypatch.setattr(read_tensors, "PIECE", 24)
    folder = saved(model, tmp_path)
    found = empty()
    load_checkpoint_in_model(found, folder)
    assert same(found, model)

    monkeypatch.setattr(read_tensors, "_is_away", lambda tensor: True)
    found = Net()
    load_checkpoint_in_model(found, folder)
    assert same(found, model)
    found = empty()
    load_checkpoint_in_model(found, folder, {"": "cpu"}, dtype=torch.float64)
    assert torch.equal(found.embed.weight, model.embed.weight.double())


def test_buffers_of_one_device_are_not_used_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that was recorded on one GPU cannot be on another one."""
    lanes: dict[torch.device, list[int]] = {}

    class Watched(PlainLane):
        def __init__(self, device: torch.device) -> None:
            self.sent = lanes.setdefault(device, [])
            self.own: list[torch.Tensor] = []

        def buffer(self, size: int) -> torch.Tensor:
            self.own.append(super().buffer(size))
            return self.own[-1]

        def send(self, outs: list[torch.Tensor], content: torch.Tensor, mark: Any) -> None:
            assert content.data_ptr() in {buffer.data_ptr() for buffer in self.own}
            self.sent.append(content.data_ptr())
            super().send(outs, content, mark)

    monkeypatch.setattr(read_tensors, "_is_away", lambda tensor: True)
    monkeypatch.setattr(read_tensors, "lane_of_caller", Watched)
    monkeypatch.setattr(read_tensors, "PIECE", 8)
    devices = [torch.device("cpu"), torch.device("cpu", 0)] * 2
    reads = [read_tensors.Read(HostTensor(torch.arange(100)), device, torch.float64) for device in devices]
    read_tensors.read_all(reads)
    assert all(read.result is not None and torch.equal(read.result, torch.arange(100).double()) for read in reads)
    assert [len(sent) for sent in lanes.values()] == [200, 200]


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


@pytest.mark.parametrize("places", [None, {"": "cpu"}, {"": "cpu", "blocks": "disk"}], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("safe", [True, False])
def test_another_default_device(model: Net, tmp_path: Path, safe: bool, dtype: Any, places: Any) -> None:
    folder = saved(model, tmp_path / "weights", safe)
    found = empty()
    # Stands for a GPU: what is put there by mistake cannot be used.
    with torch.device("meta"):
        load_checkpoint_and_dispatch(found, folder, places, dtype=dtype, offload_folder=tmp_path / "disk")
        state = load_state_dict(next(folder.iterdir()))
    assert all(value.device.type == "cpu" for value in state.values())
    torch.testing.assert_close(found.eval()(TOKENS), model.eval()(TOKENS), check_dtype=False)


@pytest.mark.parametrize("places", [None, {"": "cpu"}, {"": "cpu", "blocks": "disk"}], ids=str)
@pytest.mark.parametrize("start", [Net, empty, lambda: Net().double(), lambda: empty().double()])
@pytest.mark.parametrize("safe", [True, False])
def test_inference_mode(model: Net, tmp_path: Path, safe: bool, start: Any, places: Any) -> None:
    """What is made there is as usual, and a model that was built there can be loaded into."""
    folder = saved(model, tmp_path / "weights", safe)
    outside = start()
    with torch.inference_mode():
        inside = start()
        for found in (outside, inside):
            load_checkpoint_and_dispatch(found, folder, places, offload_folder=tmp_path / "disk")
            torch.testing.assert_close(found.eval()(TOKENS), model.eval()(TOKENS), check_dtype=False)
    assert not any(value.is_inference() for value in outside.parameters() if not value.is_meta)
    load_checkpoint_in_model(start() if places else inside, folder)
    torch.testing.assert_close(outside(TOKENS), model(TOKENS), check_dtype=False)


def test_conjugated_tensors(tmp_path: Path) -> None:
    """A file of torch keeps that a tensor is to be conjugated, or negated, when it is read."""
    value = torch.randn(3, dtype=torch.complex64)
    torch.save({"a": value.conj(), "b": value.clone().conj().imag}, tmp_path / "weights.bin")
    for device_map in (None, {"": "cpu"}):
        for device in ("cpu", "meta"):
            found = nn.ParameterDict({"a": torch.zeros(3, dtype=torch.complex64), "b": torch.zeros(3)}).to(device)
            load_checkpoint_in_model(found, tmp_path / "weights.bin", device_map)
            assert torch.equal(found["a"].detach(), value.conj()) and torch.equal(found["b"].detach(), -value.imag)


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
    with pytest.raises(RuntimeError, match=r"does not match this Net: it lacks norm\.bias and has more besides; give"):
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
    with pytest.raises(
        ValueError, match=r"norm\.bias has shape \(4,\) in it and \(5,\) in the model; .*norm\.weight has"
    ):
        load_checkpoint_in_model(found, folder, device_map)


def test_maps_that_do_not_fit(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path)
    found = empty()
    with pytest.raises(ValueError, match=r"no device for norm\.\w+, .*: add them, a module"):
        load_checkpoint_in_model(found, folder, {"embed": "cpu", "head": "cpu", "blocks": "cpu"})
    with pytest.raises(ValueError, match="names the device 'gpu', which cannot be used here"):
        load_checkpoint_in_model(found, folder, {"": "gpu"})
    with pytest.raises(ValueError, match=r"has no device for .*embed\.weight.*: add them"):
        load_checkpoint_in_model(found, folder, {"": None})  # type: ignore[dict-item]
    with pytest.raises(
        ValueError, match="device_map is 'auto': pass a device map, or use `load_checkpoint_and_dispatch`"
    ):
        load_checkpoint_in_model(found, folder, "auto")  # type: ignore[arg-type]
    for dtype in ("floaty", "zeros", 3):
        with pytest.raises(ValueError, match=f"dtype is {dtype!r}: give a dtype of torch, or its name"):
            load_checkpoint_in_model(found, folder, {"": "cpu"}, dtype=dtype)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"dtype is {dtype!r}: give a dtype of torch, or its name"):
            load_checkpoint_and_dispatch(found, folder, "auto", dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype is 'bf16' \(did you mean `bfloat16`\?\): give a dtype of torch"):
        load_checkpoint_and_dispatch(found, folder, "auto", dtype="bf16")
    with pytest.raises(TypeError, match="max_memory is a str: pass a dict"):
        load_checkpoint_and_dispatch(found, folder, "auto", max_memory="1GB")  # type: ignore[arg-type]
    assert all(parameter.is_meta for parameter in found.parameters())


def test_arguments_in_the_other_order_and_a_misspelt_map(model: Net, tmp_path: Path) -> None:
    load: Any
    for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
        words = rf"`{load.__name__}` loads weights into a model, and 'folder' is a str: pass the model, and then the ch"
        with pytest.raises(AttributeError, match=words):
            load("folder", model)
    with pytest.raises(
        ValueError, match=r"device_map is 'atuo' \(did you mean `auto`\?\): give a map, or one of 'auto'"
    ):
        load_checkpoint_and_dispatch(model, saved(model, tmp_path), device_map="atuo")


def test_the_disk(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path / "weights")
    device_map = {"embed": "cpu", "head": "cpu", "blocks": "disk", "norm": "disk"}
    with pytest.raises(ValueError, match="puts blocks, norm on disk: pass an offload_folder"):
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


def test_the_state_dict_of_an_offloaded_model_does_not_pass_through_the_device_that_computes() -> None:
    """The meta device stands for a GPU: what is brought there does not come back by itself."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights = {name: value.clone() for name, value in layers.state_dict().items()}
    state = get_state_dict_offloaded_model(cpu_offload(layers, "meta"))
    assert state.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in state.items())


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("places", [{"": "disk"}, {"": "cpu", "embed": "disk"}, {"": "disk", "embed": "cpu"}], ids=str)
def test_tied_weights_on_disk(model: Net, tmp_path: Path, safe: bool, places: dict[str, str]) -> None:
    folder = saved(model, tmp_path / "weights", safe)
    found = load_checkpoint_and_dispatch(empty(), folder, places, offload_folder=tmp_path / "disk", strict=True).eval()
    assert found.head.weight is found.embed.weight
    for _ in range(2):
        assert torch.equal(found(TOKENS), model.eval()(TOKENS))


def test_too_little_memory(model: Net, tmp_path: Path) -> None:
    folder = saved(model, tmp_path)
    with pytest.raises(ValueError, match=r"it needs 636 bytes, .* cpu has 400 bytes; the remaining \d+ bytes"):
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
    save_file({"a": torch.ones(1)}, tmp_path / "tf.safetensors", metadata={"format": "tf"})
    with pytest.raises(ValueError, match="the format 'tf', but a PyTorch model needs 'pt'"):
        load_state_dict(tmp_path / "tf.safetensors")


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
    with pytest.raises(ValueError, match="has no weights"):
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
    for damaged_index in ("{}", "[1]", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["b"]}}'):
        (tmp_path / "model.safetensors.index.json").write_text(damaged_index)
        with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
            load_checkpoint_in_model(Net(), tmp_path)
    torch.save([1, 2], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_checkpoint_in_model(Net(), tmp_path / "list.bin")


def moved(entry: dict[str, Any], by: int, end: int = 0) -> None:
    entry["data_offsets"] = [entry["data_offsets"][0] + by, entry["data_offsets"][1] + by + end]


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: moved(header["norm.bias"], 8),
        lambda header: moved(header["norm.bias"], 0, end=-8),
        lambda header: moved(header["norm.bias"], -header["norm.bias"]["data_offsets"][1]),
        lambda header: header["norm.bias"].update(data_offsets=header["norm.weight"]["data_offsets"]),
        lambda header: header["norm.bias"].update(shape=[3]),
        lambda header: header["norm.bias"].update(shape=[-2, -2]),
        lambda header: header["norm.bias"].update(data_offsets=[0]),
        lambda header: header.pop("embed.weight"),
    ],
    ids=["shifted", "too short", "negative", "twice", "shape", "negative shape", "no end", "a gap"],
)
def test_headers_that_are_damaged(model: Net, tmp_path: Path, damage: Any) -> None:
    file = saved(model, tmp_path) / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    damage(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    for device_map in (None, {"": "cpu"}):
        with pytest.raises(CheckpointError, match=r"model\.safetensors .*: .*load another checkpoint\."):
            load_checkpoint_in_model(empty(), tmp_path, device_map)


def test_more_than_there_should_be(model: Net, tmp_path: Path) -> None:
    file = saved(model, tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"junk")
    with pytest.raises(CheckpointError, match=r"has \d+ bytes and should have \d+"):
        load_checkpoint_in_model(Net(), tmp_path)


def without_buffers() -> Net:
    with init_empty_weights(include_buffers=True):
        return Net()


@pytest.mark.parametrize("start", [Net, without_buffers])
@pytest.mark.parametrize("places", [None, {"": "cpu"}, {"": "cpu", "blocks": "disk"}], ids=str)
def test_an_error_while_reading_is_told(
    model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any, places: Any
) -> None:
    folder = saved(model, tmp_path / "weights")
    read, calls = os.preadv, iter(range(1000))

    def fail(*args: Any) -> int:
        if next(calls) == 3:
            raise OSError(5, "Input/output error")
        return read(*args)

    found = start()
    before = {name: value.clone() for name, value in found.state_dict().items()}
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .*Input/output error") as told:
        load_checkpoint_in_model(found, folder, places, tmp_path / "disk", dtype=torch.float16)
    in_place = start is Net and places is None
    assert str(told.value).startswith("The weights of this Net may be partly loaded") is in_place
    after = found.state_dict()
    kept = all(
        value.is_meta == after[name].is_meta and value.dtype == after[name].dtype for name, value in before.items()
    )
    assert kept and (
        in_place or all(value.is_meta or torch.equal(value, after[name]) for name, value in before.items())
    )


def test_an_interrupt_while_reading(model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever presses Ctrl-C does not have a model written to behind their back, nor wait for all of it."""
    folder = saved(model, tmp_path)
    monkeypatch.setattr(read_tensors, "PIECE", 4)
    before = set(threading.enumerate())
    read = ControlC(os.preadv, 20, monkeypatch)
    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint_in_model(Net(), folder)
    assert set(threading.enumerate()) == before and 20 <= read.calls < 60


def load_from_first(folder: str) -> tuple[bool, bool]:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = Net()
    load_checkpoint_in_model(model, folder if rank == 0 else "/nowhere", broadcast_from_rank0=True, strict=True)
    expected = torch.load(Path(folder, "expected.pt"), weights_only=True)
    right = all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    return right, model.head.weight is model.embed.weight


def test_only_the_first_rank_reads(model: Net, tmp_path: Path) -> None:
    saved(model, tmp_path, shards=2)
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    assert run_world(load_from_first, 2, str(tmp_path)) == [(True, True)] * 2


def load_what_is_missing(folder: str) -> None:
    torch.distributed.init_process_group("gloo")
    with pytest.raises(ValueError, match="none does not exist"):
        load_checkpoint_in_model(Net(), f"{folder}/none", broadcast_from_rank0=True)
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing"):
        load_checkpoint_in_model(Net(), folder, broadcast_from_rank0=True)
    with pytest.raises(ValueError, match=r"head\.bias has shape \(4,\) in it and \(3,\) in the model\)"):
        load_checkpoint_in_model(nn.ModuleDict({"head": nn.Linear(2, 3)}), f"{folder}/w.bin", broadcast_from_rank0=True)


def test_all_ranks_are_told_what_the_first_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    torch.save({"head.weight": torch.ones(3, 2), "head.bias": torch.ones(4)}, tmp_path / "w.bin")
    run_world(load_what_is_missing, 2, str(tmp_path))


class Odd(nn.Module):
    """Has what is no ordinary tensor in its state dict: extra states of two kinds, and a sparse buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner, self.last = Renamed(), nn.Linear(4, 4)
        self.inner.steps = int(value)
        self.register_buffer("sparse", torch.eye(3).mul(value).to_sparse())
        nn.init.constant_(self.last.weight, value)
        self.scales = torch.tensor([value])

    def get_extra_state(self) -> torch.Tensor:
        return self.scales

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = state.clone()


def load_odd_entries(folder: str, shards: bool, broadcast: bool) -> None:
    torch.distributed.init_process_group("gloo")
    model, here = Odd(1.0), folder if not broadcast or torch.distributed.get_rank() == 0 else "/nowhere"
    if shards:
        fully_shard(model.last, mesh=init_device_mesh("cpu", (2,)))
    load_checkpoint_in_model(model, f"{here}/model.bin.index.json", broadcast_from_rank0=broadcast, strict=True)
    found = model.state_dict()
    weight = found["last.weight"]
    assert bool(((weight.full_tensor() if shards else weight) == 7).all())
    assert model.inner.steps == model.scales == 7 and model.inner.head.weight is model.inner.linear.weight
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3) * 7)
    for file, problem in (
        ("sparse.bin", "last.weight is sparse in it and not in the model"),
        ("none.bin", "last.weight is an int in it and a tensor in the model"),
        ("dense.bin", "sparse is sparse in the model and not in it"),
        ("size.bin", r"sparse has shape \(4, 4\) in it and \(3, 3\) in the model"),
    ):
        with pytest.raises(ValueError, match=rf"{file} does not fit this Odd \({problem}\): give the model"):
            load_checkpoint_in_model(model, f"{here}/{file}", broadcast_from_rank0=broadcast)
        assert torch.equal(model.state_dict()["sparse"].to_dense(), torch.eye(3) * 7)
    load_checkpoint_in_model(model, f"{here}/few.bin", broadcast_from_rank0=broadcast)
    assert model.inner.steps == model.scales == 7


@pytest.mark.parametrize(("shards", "broadcast"), [(True, False), (True, True), (False, True)])
def test_models_over_ranks_get_what_is_no_ordinary_tensor(shards: bool, broadcast: bool, tmp_path: Path) -> None:
    state = Odd(7.0).state_dict()
    first = {name: state.pop(name) for name in list(state) if "inner" not in name}
    torch.save(first, tmp_path / "a.bin")
    torch.save(state, tmp_path / "b.bin")
    (tmp_path / "model.bin.index.json").write_text('{"a": "a.bin", "b": "b.bin"}')
    state |= first
    torch.save({**state, "last.weight": torch.eye(4).to_sparse()}, tmp_path / "sparse.bin")
    torch.save({**state, "sparse": torch.eye(3)}, tmp_path / "dense.bin")
    torch.save({"last.weight": torch.eye(4)}, tmp_path / "few.bin")
    torch.save({**state, "last.weight": 3}, tmp_path / "none.bin")
    torch.save({**state, "sparse": torch.eye(4).to_sparse()}, tmp_path / "size.bin")
    run_world(load_odd_entries, 2, str(tmp_path), shards, broadcast)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pieces_are_cast_as_they_come(
    dtype: torch.dtype, away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_tensors, "_is_away", lambda tensor: away)  # as on a GPU, if it is True
    monkeypatch.setattr(read_tensors, "PIECE", 64)
    weights = {"a": torch.randn(33, 7), "b": torch.randn(50).half(), "c": torch.arange(20), "d": torch.tensor(2.0)}
    save_file(weights, tmp_path / "w.safetensors", metadata={"format": "pt"})
    sources = open_weights(tmp_path / "w.safetensors").tensors
    cpu = torch.device("cpu")
    fresh = {name: read_tensors.Read(source, cpu, dtype) for name, source in sources.items()}
    into = {name: torch.zeros(value.shape, dtype=dtype) for name, value in weights.items()}
    turned = torch.zeros(7, 33, dtype=dtype).T
    filled = [read_tensors.Read(sources[name], cpu, dtype, into[name]) for name in weights]
    read_tensors.read_all([*fresh.values(), *filled, read_tensors.Read(sources["a"], cpu, dtype, turned)])
    for name, value in weights.items():
        for found in (fresh[name].result, into[name]):
            assert found is not None and found.dtype == dtype and torch.equal(found, value.to(dtype))
    assert torch.equal(turned, weights["a"].to(dtype))


class Renamed(nn.Module):
    """Knows the names of an older version, has extra state, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.linear.weight
        self.steps = 0
        self.register_load_state_dict_pre_hook(rename)

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state_dict if name.startswith(f"{prefix}old.")]:
        state_dict[f"{prefix}linear.{name.removeprefix(f'{prefix}old.')}"] = state_dict.pop(name)


def old_names() -> dict[str, Any]:
    tensors = {"old.weight": torch.full((3, 3), 2.0), "old.bias": torch.ones(3), "head.bias": torch.ones(3)}
    return {**tensors, "_extra_state": {"steps": 7}}


def test_models_that_load_by_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "weights.bin"
    torch.save({f"0.{name}": value for name, value in old_names().items()}, file)
    filled = nn.Sequential(Renamed())
    kept = dict(filled.named_parameters())
    with init_empty_weights():
        emptied = nn.Sequential(Renamed())
    for found in (filled, emptied):
        load_checkpoint_in_model(found, file, strict=True)
        assert found[0].linear.weight.sum() == 18 and found[0].head.weight is found[0].linear.weight
        assert found[0].steps == 7
    assert all(parameter is kept[name] for name, parameter in filled.named_parameters())
    assert not any(parameter.is_meta for parameter in emptied.parameters())
    with init_empty_weights():
        emptied = nn.Sequential(Renamed())
    torch.save({"0.old.bias": torch.ones(3), "0._extra_state": {"steps": 7}, "epoch": 3}, file)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(emptied, file)
    assert "lacks 0.head.bias, 0.head.weight, 0.linear.weight and has epoch besides" in caplog.text
    assert {name for name, value in emptied.named_parameters() if value.is_meta} == {"0.linear.weight", "0.head.bias"}


def test_models_that_load_by_themselves_are_kept_where_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    found, before = Renamed(), Renamed()
    found.load_state_dict(before.state_dict())
    torch.save({**old_names(), "more": torch.ones(1)}, file)
    with pytest.raises(RuntimeError, match="does not match this Renamed: it has more besides; give"):
        load_checkpoint_in_model(found, file, strict=True)
    torch.save({**old_names(), "head.bias": torch.ones(4)}, file)
    with pytest.raises(ValueError, match=r"does not fit this Renamed \(.*size mismatch for head.bias.*\): give"):
        load_checkpoint_in_model(found, file)
    assert all(torch.equal(value, dict(before.named_parameters())[name]) for name, value in found.named_parameters())


@pytest.mark.parametrize("start", [lambda made: made, lambda made: made.to("meta")], ids=["filled", "empty"])
def test_names_that_older_versions_of_torch_wrote(tmp_path: Path, start: Any) -> None:
    state = nn.BatchNorm1d(3).state_dict()
    del state["num_batches_tracked"]
    save_file(state, tmp_path / "norm.safetensors", metadata={"format": "pt"})
    norm = start(nn.BatchNorm1d(3))
    load_checkpoint_in_model(norm, tmp_path / "norm.safetensors", strict=True)
    assert norm.num_batches_tracked == 0 and norm.weight.sum() == 3
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(3, 3))
    save_file(old.state_dict(), tmp_path / "weight.safetensors", metadata={"format": "pt"})
    new = start(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    load_checkpoint_in_model(new, tmp_path / "weight.safetensors", strict=True)
    torch.testing.assert_close(new(torch.ones(1, 3)), old(torch.ones(1, 3)))


def test_a_load_state_dict_of_the_model_itself(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            super().load_state_dict({name.removeprefix("model."): value for name, value in state_dict.items()})

    save_file({"model.weight": torch.ones(1, 2), "model.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    found = Own(2, 1)
    load_checkpoint_in_model(found, tmp_path, strict=True)
    assert found(torch.ones(1, 2)) == 3


def test_extra_state_with_a_map(tmp_path: Path) -> None:
    saved_one = Renamed()
    saved_one.steps = 7
    torch.save(saved_one.state_dict(), tmp_path / "weights.bin")
    found = Renamed()
    places = {"linear": "disk", "head": "disk"}
    load_checkpoint_and_dispatch(found, tmp_path / "weights.bin", places, offload_folder=tmp_path / "a", strict=True)
    assert found.steps == 7 and torch.equal(found.linear(torch.ones(3)), saved_one.linear(torch.ones(3)))
    offloaded = cpu_offload(saved_one, "cpu")
    assert offloaded.state_dict()["_extra_state"] == {"steps": 7}


def test_entries_that_are_no_tensors(tmp_path: Path) -> None:
    torch.save({**nn.Linear(2, 2).state_dict(), "epoch": 3}, tmp_path / "weights.bin")
    assert load_state_dict(tmp_path / "weights.bin")["epoch"] == 3
    for device_map in (None, {"": "cpu"}):
        with pytest.raises(RuntimeError, match="has epoch besides"):
            load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "weights.bin", device_map, strict=True)


class Shares(nn.Module):
    """A module that has two names, and a buffer that two modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm
        self.inner = nn.Linear(4, 4)
        self.register_buffer("shift", torch.rand(4))
        self.inner.register_buffer("shift", self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.inner(self.norm(x)) + self.shift) - self.inner.shift / 2  # type: ignore[no-any-return]


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("start", ["full", "without parameters", "without anything"])
@pytest.mark.parametrize("places", [None, {"": "cpu"}, {"": "disk"}, {"": "cpu", "inner": "disk", "again": "disk"}])
def test_buffers_that_have_several_names(places: Any, start: str, of_torch: bool, tmp_path: Path) -> None:
    """A file has each of them once, under one name."""
    x = torch.rand(3, 4)
    plain = Shares().eval()
    plain.norm.running_mean.normal_()  # type: ignore[union-attr]
    folder = saved(plain, tmp_path / "saved")
    for offload_buffers in (False, True):
        with contextlib.ExitStack() as stack:
            if start != "full":
                stack.enter_context(init_empty_weights(include_buffers=start == "without anything"))
            made = Shares().eval()
        if of_torch:
            made.register_load_state_dict_post_hook(lambda module, names: None)
        load_checkpoint_and_dispatch(
            made,
            folder,
            places,
            offload_folder=tmp_path / f"{offload_buffers}",
            offload_buffers=offload_buffers,
            strict=True,
        )
        assert torch.equal(made(x), plain(x))
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in made.state_dict().items())
        if places is None:
            assert made.shift is made.inner.shift


def test_sparse_tensors_in_torch_files(tmp_path: Path) -> None:
    class Sparse(nn.Linear):
        def __init__(self, scale: float) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", scale * torch.eye(2).to_sparse())

    loaded: Any = Sparse(0.0)
    saved, plain = Sparse(1.0), nn.Linear(2, 2)
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    load_checkpoint_in_model(loaded, tmp_path)
    assert torch.equal(loaded.mask.to_dense(), torch.eye(2)) and torch.equal(loaded.weight, saved.weight)
    load_checkpoint_in_model(plain, tmp_path)  # which has no use for it
    assert torch.equal(plain.weight, saved.weight)


class OneElement(nn.Module):
    """A parameter of one element that keeps the stride of the row it was taken from."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([5.0, 7.0])[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_one_element_with_a_stride(tmp_path: Path, device: str) -> None:
    one = torch.ones(1)
    torch.save(OneElement().state_dict(), tmp_path / "pytorch_model.bin")
    model = OneElement()
    nn.init.zeros_(model.scale)
    load_checkpoint_in_model(model, tmp_path / "pytorch_model.bin")
    assert model(one).tolist() == [5.0]
    dispatched = dispatch_model(OneElement(), {"": device}, main_device="cpu", offload_dir=tmp_path / "disk")
    assert dispatched(one).tolist() == [5.0]
    with init_empty_weights():
        empty_one = OneElement()
    loaded = load_checkpoint_and_dispatch(
        empty_one, tmp_path / "pytorch_model.bin", {"": device}, offload_folder=tmp_path / "loaded"
    )
    assert loaded(one).tolist() == [5.0]


def test_an_index_that_leads_out_of_its_folder(model: Net, tmp_path: Path) -> None:
    outside = saved(model, tmp_path / "outside") / "model.safetensors"
    folder = tmp_path / "inside"
    folder.mkdir()
    for name in ("../outside/model.safetensors", str(outside), "a/../../outside/model.safetensors", "", 3, "a\0b"):
        index = {"weight_map": dict.fromkeys(model.state_dict(), name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
            with pytest.raises(CheckpointError, match=r"index\.json is damaged \(.*is not in its folder\)"):
                load(Net(), folder)
    # A link is a file of the folder all the same: caches of downloads are full of them.
    (folder / "linked.safetensors").symlink_to(outside)
    index = {"weight_map": dict.fromkeys(model.state_dict(), "linked.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = Net()
    load_checkpoint_in_model(loaded, folder)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_nesting_without_end_and_numbers_that_are_not_whole(model: Net, tmp_path: Path) -> None:
    deep = b"[" * 200_000
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(deep)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        load_checkpoint_in_model(Net(), tmp_path)
    index.unlink()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(CheckpointError, match=r"safetensors cannot be read \(it is nested too deeply\)"):
        load_checkpoint_in_model(Net(), tmp_path)
    raw = (saved(model, tmp_path / "whole") / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for wrong in (lambda size: float(size), lambda size: size == 1 or size, lambda size: str(size)):
        header = json.loads(raw[8:start])
        name = next(name for name in header if name != "__metadata__")
        header[name]["shape"] = [wrong(size) for size in [*header[name]["shape"], 1]]
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
        for device_map in (None, {"": "cpu"}):
            with pytest.raises(CheckpointError, match="which are not all whole numbers of at least 0"):
                load_checkpoint_in_model(Net(), tmp_path, device_map)


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "model.safetensors.index.json").symlink_to("/dev/zero")
    for name in ("pipe.bin", "pipe.safetensors"):
        with pytest.raises(CheckpointError, match="A device or a pipe, not a regular file"):
            open_weights(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged \(.*A device or a pipe, not a regular file"):
        load_checkpoint_in_model(Net(), tmp_path)
