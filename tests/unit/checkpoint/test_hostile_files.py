"""Files that were made to do harm, or are of other versions of NumPy: what may be in them is read, and nothing else."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.checkpoint import reader
from accelerate.checkpoint.layout import Manifest, _sum
from accelerate.checkpoint.reader import CheckpointReader, _can_bring_in
from accelerate.checkpointing import verify_checkpoint
from accelerate.errors import CheckpointError
from accelerate.io import disk, safe_load, stored_tensors, torch_format
from accelerate.io.safe_load import name_of, read_torch
from accelerate.io.stored_tensors import write_safetensors
from accelerate.io.torch_format import write_torch
from accelerate.utils import load_checkpoint_in_model

RECONSTRUCT, SCALAR = np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0]


class Call:
    """Pickled as a call of a function, and with a state, of `__setstate__` of what it returns."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def write(path: Path, pickled: bytes, members: torch_format.Members, order: str = sys.byteorder) -> None:
    archive = torch_format.Archive()
    archive.add("data.pkl", pickled)
    archive.add("byteorder", order.encode())
    for key, storage in members.items():
        assert isinstance(storage, torch.UntypedStorage)
        archive.add(f"data/{key}", torch.empty(0, dtype=torch.uint8).set_(storage))
    archive.add("version", b"3\n")
    archive.write(path)


ARRAYS = [
    np.arange(6, dtype=np.uint32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">i4"),
    np.array(["a", "bc"]),
    np.array([b"a", b"bc"]),
    np.array([True]),
    np.array(2j),
    np.ones((0, 3), np.float16),
    np.float32(2.5),
    np.int64(-3),
    np.str_("x"),
    np.dtype(">f4"),
    np.dtype("S8"),
]


@pytest.mark.parametrize("core", ["core", "_core"])
@pytest.mark.parametrize("value", ARRAYS, ids=repr)
def test_numpy_before_and_after_version_2(tmp_path: Path, value: Any, core: str) -> None:
    """It has moved its functions: `numpy.core` was their place until 2.0, and `numpy._core` is since."""
    content = {"a": value, "b": [value, (1, (value,))], "c": deque([value], 2), "d": Counter(x=value)}
    pickled = torch_format._pickled(content)[0].replace(b"numpy._core", b"numpy.core")
    write(tmp_path / "x", pickled.replace(b"numpy.core", b"numpy." + core.encode()), {})
    found = read_torch(tmp_path / "x")
    expected = pickle.loads(pickle.dumps(value))
    for one in (found["a"], found["b"][0], found["b"][1][1][0], found["c"][0], found["d"]["x"]):
        assert type(one) is type(expected) and np.array_equal(one, expected)
        if not isinstance(value, np.dtype):
            assert one.dtype == expected.dtype and one.flags.f_contiguous == expected.flags.f_contiguous
    assert found["a"] is found["b"][0] or not isinstance(value, np.ndarray)  # one array stays one


def test_random_states_of_another_version_of_numpy(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path)
    expected = np.random.rand(3).tolist()
    (tmp_path / "accelerate_manifest.json").unlink()
    states = torch.load(tmp_path / "random_states_0.pkl", weights_only=False)
    pickled, members = torch_format._pickled(states)
    here, other = (b"_core", b"core") if b"numpy._core" in pickled else (b"core", b"_core")
    write(tmp_path / "random_states_0.pkl", pickled.replace(b"numpy." + here, b"numpy." + other), members)
    accelerator.load_state(tmp_path)
    assert np.random.rand(3).tolist() == expected


def dtype(name: str, **state: Any) -> Call:
    full = {"order": "<", "sub": None, "names": None, "fields": None, "size": -1, "align": -1, "flags": 0} | state
    return Call(np.dtype, name, False, True, state=(3, *full.values()))


def array(kind: Any, content: Any = b"AAAAAAAA", shape: Any = (1,)) -> Call:
    return Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, shape, kind, False, content))


OBJECT = Call(np.dtype, "O8", False, True)
HARMFUL = {
    "pointers of the file's": Call(np.ndarray, (1,), OBJECT, b"AAAAAAAA"),
    "objects from bytes": array(OBJECT),
    "objects from too few": array(OBJECT, [1], (1000,)),
    "a number that is an object": Call(SCALAR, OBJECT, b"AAAAAAAA"),
    "fields": Call(np.ndarray, (1,), Call(np.dtype, [("a", "O")]), b"AAAAAAAA"),
    "fields in a name": array(Call(np.dtype, "O,O"), [()]),
    "a shape that is no array's": array(dtype("S1"), b"AAAAAAAA", (-1, -8)),
    "too few bytes": array(dtype("f8"), b"AAAA"),
    "an array of another kind": Call(RECONSTRUCT, dict, (0,), b"b"),
    "a kind that is none": array("f8"),
    "a number of no kind": Call(SCALAR, "f8", b"AAAAAAAA"),
    "no bytes for a number": Call(SCALAR, dtype("f8"), b"A"),
    "a class of dtypes": Call(type(np.dtype("S8")), 8),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_an_array_is_made_of_plain_values(tmp_path: Path, name: str) -> None:
    write(tmp_path / "x", torch_format._pickled({"x": HARMFUL[name]})[0], {})
    with pytest.raises(CheckpointError, match=r"x (contains|cannot be read)") as raised:
        read_torch(tmp_path / "x")
    assert "\n" not in str(raised.value)


def test_a_dtype_is_what_its_name_says(tmp_path: Path) -> None:
    """NumPy's own would take fields, sizes and flags from the file, and with them bytes for pointers."""
    fields = {"names": ("a",), "fields": {"a": (dtype("f8"), 0)}, "flags": 63}
    content = {"a": array(dtype("S8", size=-8, align=1, **fields)), "b": dtype("f8", **fields)}
    write(tmp_path / "x", torch_format._pickled(content)[0], {})
    found = read_torch(tmp_path / "x")
    assert found["a"].dtype == np.dtype("S8") and found["a"].dtype.names is None and found["a"][0] == b"AAAAAAAA"
    assert found["b"] == np.float64 and found["b"].flags == 0


def test_an_array_gets_its_contents_once(tmp_path: Path) -> None:
    """Else a tensor of its memory could be left with none."""
    pickled = torch_format._pickled([np.arange(4.0)])[0]
    state = torch_format._pickled((1, (0,), dtype("f8"), False, b""))[0]
    # Between the array and the end, which puts it into the list: another state, and that it is for the array.
    write(tmp_path / "x", pickled[:-2] + state[2:-1] + b"b" + pickled[-2:], {})
    with pytest.raises(CheckpointError, match=r"x cannot be read .*twice"):
        read_torch(tmp_path / "x")


class Script:
    """Something of the script's own, which it allows."""

    def __init__(self) -> None:
        self.array, self.kind = np.arange(3), np.dtype("f4")


@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_script_allows_stays_allowed(tmp_path: Path, by_name: bool) -> None:
    write_torch({"x": Script(), "array": np.arange(3.0)}, tmp_path / "x")
    allowed: list[Any] = [
        (Script, name_of(Script)) if by_name else Script,
        np.ndarray,
        np.dtype,
        RECONSTRUCT,
        type(np.dtype("f8")),
    ]
    with torch.serialization.safe_globals(allowed):
        before = set(torch.serialization.get_safe_globals())
        found = read_torch(tmp_path / "x")
        assert set(torch.serialization.get_safe_globals()) == before
    assert type(found["x"].array) is np.ndarray and found["x"].array.tolist() == [0, 1, 2]
    assert found["x"].kind == np.float32 and type(found["array"]) is np.ndarray


def test_an_array_of_objects_has_a_way(tmp_path: Path) -> None:
    write_torch({"x": np.array([None, 1])}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"contains numpy\.dtype\S*, .* `load_kwargs=.'weights_only'"):
        read_torch(tmp_path / "x")
    assert read_torch(tmp_path / "x", weights_only=False)["x"].tolist() == [None, 1]


def test_the_public_list_is_for_torch(tmp_path: Path) -> None:
    write_torch({"x": np.arange(3), "y": np.float32(1)}, tmp_path / "x")
    with torch.serialization.safe_globals(safe_load.TORCH_SAFE_GLOBALS):
        found = torch.load(tmp_path / "x", weights_only=True)
    assert type(found["x"]) is np.ndarray and found["x"].tolist() == [0, 1, 2] and found["y"] == 1


def test_a_tensor_that_a_file_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is read to, so it must still be there."""
    count = 1 << 20
    pickled, members = torch_format._pickled({"drop": torch.ones(count)})
    write(tmp_path / "x", pickled[:-1] + b"X\x04\x00\x00\x00dropNs.", members)
    del members
    others = []

    def mapped(path: Path) -> torch.Tensor:
        others.extend(torch.zeros(count) for _ in range(3))  # one of which would get it
        return plain(path)

    plain = stored_tensors.mapped
    monkeypatch.setattr(reader, "mapped", mapped)
    assert CheckpointReader(tmp_path).content("x") == {"drop": None}
    assert others and not any(other.any() for other in others)


def test_what_torch_does_to_memory_is_left_to_it(tmp_path: Path) -> None:
    big = torch.arange(1 << 20, dtype=torch.int32)
    other = {"little": "big", "big": "little"}[sys.byteorder]
    pickled, members = torch_format._pickled({"x": big})
    write(tmp_path / "x", pickled, members, other)
    found = CheckpointReader(tmp_path).content("x")["x"]
    assert found[1] == 1 << 24 and torch.equal(found, torch.load(tmp_path / "x", weights_only=True)["x"])
    made = Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, big, torch.int32, "cpu", False)
    write(tmp_path / "y", *torch_format._pickled({"y": made}))
    assert torch.equal(CheckpointReader(tmp_path).content("y")["y"], big)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", ["dl_state_dict.bin", "random_states_0.pkl", "scaler.pt"])
def test_the_way_that_is_named_works(tmp_path: Path, name: str) -> None:
    precision = "fp16" if name == "scaler.pt" else "no"
    stateful = DataLoaderConfiguration(use_stateful_dataloader=name.startswith("dl"))
    accelerator = Accelerator(cpu=True, mixed_precision=precision, dataloader_config=stateful)
    accelerator.prepare(torch.utils.data.DataLoader(list(range(8)), batch_size=2))
    accelerator.save_state(tmp_path)
    (tmp_path / "accelerate_manifest.json").unlink()
    content = torch.load(tmp_path / name, weights_only=False)
    torch.save({**content, "extra": deque([1])}, tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} contains coll.* load it with `load_kwargs=.'weights_only'"):
        accelerator.load_state(tmp_path)
    accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})


def edited(manifest: Path, **changes: Any) -> bytes:
    content = json.loads(manifest.read_bytes())
    del content["crc32"]
    content |= changes
    return json.dumps(content | {"crc32": _sum(content)}).encode()


@pytest.mark.parametrize("kind", ["deep", "infinite", "nul", "empty"])
def test_odd_manifests(tmp_path: Path, kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path)
    manifest = tmp_path / "accelerate_manifest.json"
    nothing = {"size": 0, "crc32": []}
    manifest.write_bytes(
        {
            "deep": b"[" * 200_000,
            "infinite": edited(manifest, world_size=float("inf")),
            "nul": edited(manifest, files={"a\0b": nothing}),
            "empty": edited(manifest, files={"": nothing}),
        }[kind]
    )
    for use in (Manifest.read, verify_checkpoint, accelerator.load_state):
        with pytest.raises(CheckpointError, match=r"accelerate_manifest\.json is damaged .*: load another") as raised:
            use(tmp_path)
        assert "\n" not in str(raised.value) and "\0" not in str(raised.value)
    accelerator.save_state(tmp_path)  # replaces it
    verify_checkpoint(tmp_path)


class Cutting:
    """An object that cuts a file short when it is loaded: after all was checked."""

    path, size = Path(), 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        os.truncate(self.path, self.size)


@pytest.mark.parametrize("advice", [True, False], ids=["brought in", "by its size"])
@pytest.mark.parametrize(("width", "size"), [(1000, 1000), (4, 100)])
def test_a_file_that_is_cut_short_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, size: int, advice: bool
) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(width, width))
    accelerator.register_for_checkpointing(cutting := Cutting())
    accelerator.save_state(tmp_path)
    cutting.path, cutting.size = tmp_path / "model.safetensors", size
    with torch.no_grad():
        model.weight.fill_(5)
        model.bias.fill_(5)
    if not advice:
        monkeypatch.setattr(disk, "bring_in", lambda address, size: False)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        accelerator.load_state(tmp_path)
    assert (model.weight == 5).all() and (model.bias == 5).all()


def test_a_page_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at it would end the process."""
    if not _can_bring_in():
        pytest.skip("this system cannot tell")
    tensors = {name: torch.full((1000, 1000), 5.0) for name in "ab"}
    write_safetensors({name: torch.zeros(1000, 1000) for name in "ab"}, tmp_path / "x.safetensors")
    reader = CheckpointReader(tmp_path)
    reader.weights("x.safetensors", tensors)
    left = [True, False]
    monkeypatch.setattr(disk, "bring_in", lambda address, size: size == mmap.PAGESIZE or left.pop(0))
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged"):
        reader.fill()
    assert not left and all((tensor == 5).all() for tensor in tensors.values())


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_manifest_that_never_ends(tmp_path: Path, kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path)
    for name in ("accelerate_manifest.json", "random_states_0.pkl"):
        (tmp_path / name).unlink()
        if kind == "device":
            (tmp_path / name).symlink_to("/dev/zero")
        else:
            os.mkfifo(tmp_path / name)
        for use in (verify_checkpoint, accelerator.load_state):
            with pytest.raises(CheckpointError, match=r"A device or a pipe, not a regular file|has 0 bytes, but"):
                use(tmp_path)
        accelerator.save_state(tmp_path)  # replaces it
        verify_checkpoint(tmp_path)


def test_a_header_with_metadata_that_are_null_is_read(tmp_path: Path) -> None:
    """As other libraries for safetensors may write it; its own reads it."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_model(model, tmp_path)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    text = json.dumps(json.loads(raw[8:start]) | {"__metadata__": None}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    other = torch.nn.Linear(2, 2)
    load_checkpoint_in_model(other, tmp_path)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("kind", ["shared", "a float", "deep", "a list", "metadata"])
def test_a_header_that_no_writer_writes(tmp_path: Path, kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path)
    (tmp_path / "accelerate_manifest.json").unlink()
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    text = {
        "shared": json.dumps(header | {"bias": header["bias"] | {"data_offsets": [16, 24]}}).encode(),
        "a float": json.dumps(header | {"bias": header["bias"] | {"shape": [2.0]}}).encode(),
        "deep": b"[" * 200_000,
        "a list": b"[]",
        "metadata": json.dumps(header | {"__metadata__": 5}).encode(),
    }[kind]
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        accelerator.load_state(tmp_path)
    assert torch.equal(model.weight, before)
