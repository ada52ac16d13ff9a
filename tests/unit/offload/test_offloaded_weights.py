from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelerate.devices.staging import OpenFiles
from accelerate.errors import CheckpointError
from accelerate.io.stored_tensors import SafetensorsFile
from accelerate.offload.offloaded_weights import find_source, keep_on_disk
from accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from tests.harness.torch_features import has_dtype
from tests.unit.big_modeling.interrupts import ControlC

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn]


def example(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_a_weight_comes_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    weight = example(dtype, *shape)
    index = offload_weight(weight, "a.b", tmp_path)
    assert index == {"a.b": {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}}
    loaded = load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"])
    assert loaded.dtype == dtype and loaded.shape == weight.shape
    assert torch.equal(loaded.view(torch.uint8) if shape else loaded, weight.view(torch.uint8) if shape else weight)
    assert os.listdir(tmp_path) == ["a.b.dat"]


def test_several_write_the_same_weight(tmp_path: Path) -> None:
    """Processes that offload the same model to one folder at the same time."""
    weight = torch.randn(100_000)
    with ThreadPoolExecutor(2) as writers:
        for _ in writers.map(lambda _: offload_weight(weight, "a", tmp_path), range(100)):
            loaded = load_offloaded_weight(tmp_path / "a.dat", {"dtype": "float32", "shape": [100_000]})
            assert torch.equal(loaded, weight)
    assert os.listdir(tmp_path) == ["a.dat"]


RARE = ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=has_dtype(name)) for name in RARE])
def test_rare_types_in_safetensors_files(name: str, tmp_path: Path) -> None:
    weight = torch.randint(0, 255, (4, 8), dtype=torch.uint8)
    save_file({"a": weight.view(getattr(torch, name))}, tmp_path / "w.safetensors")
    loaded = SafetensorsFile(tmp_path / "w.safetensors").range_of("a").mapped()
    assert str(loaded.dtype) == f"torch.{name}" and torch.equal(loaded.view(torch.uint8), weight)


def test_strided_weights(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(3, 4).T
    index = offload_weight(weight, "w", tmp_path)
    assert torch.equal(load_offloaded_weight(tmp_path / "w.dat", index["w"]), weight)


def test_loaded_weights_can_be_written_to_and_files_do_not_change(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(3), "w", tmp_path)
    load_offloaded_weight(tmp_path / "w.dat", index["w"]).zero_()
    assert load_offloaded_weight(tmp_path / "w.dat", index["w"]).tolist() == [1.0, 1.0, 1.0]


def test_an_old_view_survives_a_new_file(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(3000), "w", tmp_path)
    old = load_offloaded_weight(tmp_path / "w.dat", index["w"])
    offload_weight(torch.zeros(3000), "w", tmp_path)
    assert old.sum() == 3000
    assert load_offloaded_weight(tmp_path / "w.dat", index["w"]).sum() == 0


def test_the_index_of_a_folder(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    assert not list(tmp_path.iterdir())
    save_offload_index({"a": {"dtype": "float32", "shape": [1]}}, tmp_path)
    save_offload_index({"b": {"dtype": "float16", "shape": []}}, tmp_path)
    assert list(json.loads((tmp_path / "index.json").read_text())) == ["a", "b"]


@pytest.mark.parametrize("content", ["{x", "[1]"])
def test_a_damaged_index(content: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged .*: remove it, and offload the model again"):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_a_folder_without_offloaded_weights(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=f"{folder} has no offloaded weights"):
            OffloadedWeightsLoader(save_folder=folder)
    keep_on_disk(tmp_path, {})
    assert len(OffloadedWeightsLoader(save_folder=tmp_path)) == 0, "that of a model without weights"


@contextmanager
def small_files() -> Iterator[None]:
    """What a full disk does: writing fails in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(tmp_path: Path) -> None:
    with small_files(), pytest.raises(OSError, match=r"big\.dat cannot be written .*: free some space.*folder") as told:
        offload_state_dict(tmp_path, {"small": torch.ones(2), "big": torch.ones(1000)})
    assert told.value.errno == errno.EFBIG
    assert set(os.listdir(tmp_path)) <= {"small.dat"}, "no draft, and no index"
    index = {f"w{number}": {"dtype": "float32", "shape": [1]} for number in range(100)}
    with small_files(), pytest.raises(OSError, match=r"index\.json cannot be written"):
        save_offload_index(index, tmp_path)
    assert set(os.listdir(tmp_path)) <= {"small.dat"}


def test_an_interrupt_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = ControlC(os.replace, 30, monkeypatch)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        offload_state_dict(tmp_path, {f"w{number}": torch.ones(2) for number in range(100)})
    written = os.listdir(tmp_path)
    assert 30 <= len(written) == replace.calls < 60, "what was being written then is whole, and nothing was begun after"
    assert all(name.endswith(".dat") for name in written)


def test_a_whole_state_dict(tmp_path: Path) -> None:
    weights = {f"w{i}": example(dtype, 5, 2) for i, dtype in enumerate(DTYPES)}
    offload_state_dict(tmp_path / "new", weights)
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(loader) == list(weights) and len(loader) == len(weights)
    for name, weight in weights.items():
        assert torch.equal(loader[name].view(torch.uint8), weight.view(torch.uint8))
    mixed = OffloadedWeightsLoader(state_dict={"mine": torch.ones(1)}, save_folder=tmp_path / "new")
    assert mixed.all_keys == ["mine", *weights]
    assert mixed["mine"].item() == 1.0
    assert "w1" in mixed and "none" not in mixed


def test_nothing_to_load_from() -> None:
    with pytest.raises(ValueError, match="pass a state_dict, a save_folder or an index"):
        OffloadedWeightsLoader()


def test_weights_in_safetensors_files(tmp_path: Path) -> None:
    weights = {"x": torch.randn(3, 4), "y": torch.randn(7).to(torch.bfloat16), "z": torch.tensor(3)}
    save_file(weights, tmp_path / "f.safetensors", metadata={"format": "pt"})
    file = str(tmp_path / "f.safetensors")
    index = {
        "a": {"safetensors_file": file, "weight_name": "x", "dtype": "float16"},
        "y": {"safetensors_file": file},
        "z": {"safetensors_file": file, "weight_name": "z"},
    }
    loader = OffloadedWeightsLoader(index=index)
    assert torch.equal(loader["a"], weights["x"].half())
    assert torch.equal(loader["y"], weights["y"])
    assert torch.equal(loader["z"], weights["z"])
    place = loader.locate("a")
    assert torch.equal(place.mapped(), weights["x"])
    buffer = torch.zeros(16, dtype=torch.uint8)
    reader = OpenFiles()
    for start in (8, 0, 8):
        place.read(buffer.numpy().data, start, reader)
        assert torch.equal(buffer.view(torch.float32), weights["x"].view(-1)[start // 4 : start // 4 + 4])
    reader.close()
    index["y"] = {"safetensors_file": file, "weight_name": "z"}  # clients write into the index
    assert torch.equal(loader["y"], weights["z"])
    with pytest.raises(KeyError, match="has no tensor called 'q'"):
        SafetensorsFile(file).range_of("q")


def test_a_file_is_read_as_it_was_when_its_contents_were(tmp_path: Path) -> None:
    """Another file gets the name, with the weights at other places, after the first was looked into."""
    path = tmp_path / "f.safetensors"
    first, second = {"x": torch.randn(9)}, {"a": torch.randn(50), "x": torch.randn(9)}
    save_file(first, path)
    place = SafetensorsFile(path).range_of("x")
    save_file(second, tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").rename(path)
    reader = OpenFiles()
    for wanted, source in ((first, place), (second, SafetensorsFile(path).range_of("x")), (first, place)):
        buffer = torch.zeros(9)
        source.read(buffer.view(torch.uint8).numpy().data, 0, reader)
        assert torch.equal(buffer, wanted["x"])
    reader.close()


def test_prefixes() -> None:
    data = {"a.b.w": 1, "a.b.v": 2, "c.w": 3}
    part = PrefixedDataset(data, "a.b.")
    assert dict(part) == {"w": 1, "v": 2} and len(part) == 2
    assert part["w"] == 1 and "q" not in part
    tensors = {"a.b.w": torch.ones(1)}
    assert find_source(PrefixedDataset(PrefixedDataset(tensors, "a."), "b."), "w") is tensors["a.b.w"]


def test_parts_of_a_state_dict() -> None:
    state = {name: torch.empty(0) for name in ("a.w", "a.b.w", "ab.w", "c", "d.e.f")}
    assert list(extract_submodules_state_dict(state, ["a", "c", "d.e"])) == ["a.w", "a.b.w", "c", "d.e.f"]
    assert list(extract_submodules_state_dict(state, [""])) == list(state)
    assert extract_submodules_state_dict(state, []) == {}


def test_what_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    weights = {"a": torch.randn(4), "b": torch.randn(4)}
    keep_on_disk(tmp_path, weights)
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.dat")}
    keep_on_disk(tmp_path, weights)
    assert before == {path.name: path.stat().st_ino for path in tmp_path.glob("*.dat")}
    # Another value, dtype or shape is written; so is what has no file any more.
    (tmp_path / "b.dat").unlink()
    changed = {"a": weights["a"] + 1, "b": weights["b"]}
    keep_on_disk(tmp_path, changed)
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path)["a"], changed["a"])
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path)["b"], changed["b"])
    (tmp_path / "a.dat").write_bytes(b"short")
    keep_on_disk(tmp_path, changed)
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path)["a"], changed["a"])
    keep_on_disk(tmp_path, {"a": torch.zeros(2, 2, dtype=torch.float16)})
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].shape == (2, 2)


def test_weights_without_a_value_must_be_on_disk(tmp_path: Path) -> None:
    keep_on_disk(tmp_path, {"a": torch.ones(2)})
    keep_on_disk(tmp_path, {"a": torch.empty(2, device="meta")})
    with pytest.raises(ValueError, match="b cannot be offloaded to disk: it has no value"):
        keep_on_disk(tmp_path, {"b": torch.empty(2, device="meta")})


def test_weights_back_into_a_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_state_dict(tmp_path, expected)
    empty = torch.nn.Linear(2, 3, device="meta")
    load_offloaded_weights(empty, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert all(torch.equal(empty.state_dict()[name], value) for name, value in expected.items())
    load_offloaded_weights(model, None, tmp_path)


def test_weights_are_put_back_from_safetensors_files_and_without_the_scales_of_8_bit_layers(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(2, 2), "0.weight", tmp_path)
    index = offload_weight(torch.ones(2), "0.SCB", tmp_path, index)
    save_file({"w": torch.full((2, 2), 3.0)}, tmp_path / "w.safetensors")
    index["1.weight"] = {"safetensors_file": str(tmp_path / "w.safetensors"), "weight_name": "w", "dtype": "float32"}
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False, device="meta") for _ in range(2)))
    load_offloaded_weights(model, index, tmp_path)
    assert torch.equal(model[0].weight, torch.ones(2, 2)) and torch.equal(model[1].weight, torch.full((2, 2), 3.0))
