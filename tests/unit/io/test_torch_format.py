"""Files of `torch.save` that this package writes and reads by itself: torch must not see a difference."""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpoint.reader import CheckpointReader
from accelerate.errors import CheckpointError
from accelerate.io import blocks, safe_load, torch_format
from accelerate.io.torch_format import write_torch

LARGE = 400_000  # of float32: what is read to its place


def contents() -> dict[str, Any]:
    big = torch.arange(LARGE, dtype=torch.float32)
    return {
        "big": big,
        "part": big[5:10],
        "turned": big[:6].reshape(2, 3).t(),
        "as integers": big.view(torch.int32)[:3],
        "half": torch.full((LARGE,), 2.5, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "nothing": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "plain": [1, "two", (3.0, None), collections.OrderedDict(a=torch.tensor(7))],
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert found["plain"][:3] == expected["plain"][:3] and found["plain"][3]["a"] == 7
    assert found["part"].untyped_storage().data_ptr() == found["big"].untyped_storage().data_ptr()


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_reads_it(tmp_path: Path, mapped: bool) -> None:
    write_torch(contents(), tmp_path / "x")
    same(torch.load(tmp_path / "x", weights_only=True, mmap=mapped), contents())


@pytest.mark.parametrize("ours", [False, True])
def test_it_is_read_to_its_place(tmp_path: Path, ours: bool) -> None:
    expected = contents()
    if ours:
        write_torch(expected, tmp_path / "x")
    else:
        del expected["as integers"]  # torch refuses memory of two kinds
        torch.save(expected, tmp_path / "x")
    assert len(safe_load.Opened(tmp_path / "x").places) == 1 + ours
    reader = CheckpointReader(tmp_path, {"x": blocks.summed_up(tmp_path / "x")})
    same(reader.content("x"), expected)
    assert reader.unchecked == {}


@pytest.mark.parametrize("fast", [True, False])
def test_other_programs_accept_its_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """Members that fill many blocks, that begin and end within one, and that share one with many others."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 16)
    if not fast:  # where isal is not installed
        monkeypatch.setattr(blocks, "crc32_combine", blocks.combine_by_zlib)
    entry = write_torch({**contents(), "many": [torch.full((n,), n) for n in range(500)]}, tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x") as archive:
        assert archive.testzip() is None
    if (unzip := shutil.which("unzip")) is not None:
        said = subprocess.run([unzip, "-t", str(tmp_path / "x")], capture_output=True, text=True)
        assert said.returncode == 0 and "No errors detected" in said.stdout, said.stdout + said.stderr
    assert entry == blocks.summed_up(tmp_path / "x")


def test_damage_is_seen_while_reading(tmp_path: Path) -> None:
    entry = write_torch(contents(), tmp_path / "x")
    content = bytearray((tmp_path / "x").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match="x is damaged"):
        CheckpointReader(tmp_path, {"x": entry}).content("x")


def test_what_torch_looks_at_is_read_by_torch(tmp_path: Path) -> None:
    places = torch.arange(LARGE).unsqueeze(0)
    sparse = torch.sparse_coo_tensor(places, torch.ones(LARGE), (LARGE,), check_invariants=True)
    torch.save({"sparse": sparse}, tmp_path / "sparse")
    assert safe_load.Opened(tmp_path / "sparse").places == {}
    assert torch.equal(CheckpointReader(tmp_path).content("sparse")["sparse"].to_dense(), torch.ones(LARGE))
    torch.save({"big": torch.ones(LARGE)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert torch.equal(CheckpointReader(tmp_path).content("old")["big"], torch.ones(LARGE))


def test_more_than_four_gigabytes(tmp_path: Path) -> None:
    huge = torch.empty(5 << 30, dtype=torch.uint8)  # takes no memory while nobody touches it
    archive = torch_format.archive_of({"huge": huge, "after": torch.arange(5), "count": list(range(3))})
    sums = [zlib.crc32(piece) if isinstance(piece, bytes) else 0 for piece in archive.pieces()]
    pieces = [piece.make(sums) if isinstance(piece, blocks.Late) else piece for piece in archive.pieces()]
    at = 0
    with open(tmp_path / "x", "wb") as file:
        for piece in pieces:
            if len(piece) < 1 << 20:
                file.seek(at)
                file.write(piece if isinstance(piece, bytes) else bytes(piece.tolist()))
            at += len(piece)
        file.truncate(at)
    found = torch.load(tmp_path / "x", weights_only=True, mmap=True)
    assert found["huge"].shape == huge.shape and found["after"].tolist() == [0, 1, 2, 3, 4]
    with zipfile.ZipFile(tmp_path / "x") as opened:
        sizes = {member.filename: member.file_size for member in opened.infolist()}
    assert sizes["archive/data/0"] == 5 << 30 and os.path.getsize(tmp_path / "x") == at
    [(offset, memory)] = safe_load.Opened(tmp_path / "x").places.values()
    assert offset % 64 == 0 and len(memory) == 5 << 30


def test_many_members(tmp_path: Path) -> None:
    count = 66_000  # more than two bytes can say
    archive = torch_format.Archive()
    for number in range(count):
        archive.add(str(number), b"%d" % number)
    archive.add("version", b"3\n")
    archive.write(tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x") as found:
        assert len(found.namelist()) == count + 1 and found.read(f"archive/{count - 1}") == b"65999"
    assert torch._C.PyTorchFileReader(str(tmp_path / "x")).get_record("65998") == b"65998"


def small_tensors(count: int = 300) -> dict[str, Any]:
    """As the state of an optimizer is."""
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    state: dict[Any, Any] = {
        number: {"step": torch.tensor(float(number)), "square": torch.full((2, 3), number).to(kinds[number % 4]).t()}
        for number in range(count)
    }
    state[count] = {"big": torch.arange(LARGE, dtype=torch.float32), "part": torch.arange(9)[2:5], "none": None}
    group = {"lr": 0.1, "betas": (0.9, -1), "params": [*range(count + 1), 1 << 40], "fused": False, "name": "ä"}
    return {"state": state, "param_groups": [group, {"alone": (torch.ones(2),)}]}


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        same_look = (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        return same_look and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(equal(found[key], value) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        same_kind = type(found) is type(expected) and len(found) == len(expected)
        return same_kind and all(map(equal, found, expected))
    return type(found) is type(expected) and bool(found == expected)


def members(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name for name in archive.namelist() if "/data/" in name]


def test_small_tensors_are_put_together(tmp_path: Path) -> None:
    entry = write_torch(small_tensors(), tmp_path / "x", together=True)
    assert len(members(tmp_path / "x")) == 4 + 3  # one for each dtype; the large one, the part, the one in a tuple
    assert equal(torch.load(tmp_path / "x", weights_only=True), small_tensors())
    assert equal(torch.load(tmp_path / "x", weights_only=True, mmap=True), small_tensors())
    found = CheckpointReader(tmp_path, {"x": entry}).content("x")
    assert equal(found, small_tensors())
    tensors = [value for values in found["state"].values() for key, value in values.items() if key != "none"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)  # each has its own again
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors if tensor.numel() != 3)


def test_what_shares_something_stays_as_torch_writes_it(tmp_path: Path) -> None:
    for number, change in enumerate(
        [
            lambda state: state.update(again=state[0]["step"]),
            lambda state: state.update(view=state[0]["step"].view(1)),
            lambda state: state.update(twice=state[0]),
            lambda state: state.update(ordered=collections.OrderedDict(a=1)),
            lambda state: state.update(parameter=torch.nn.Parameter(torch.ones(1))),
            lambda state: state.update(sparse=torch.eye(2).to_sparse()),
        ]
    ):
        content = small_tensors()
        change(content["state"])
        write_torch(content, tmp_path / str(number), together=True)
        assert len(members(tmp_path / str(number))) > 600
    found = CheckpointReader(tmp_path).content("0")["state"]
    assert found["again"] is found[0]["step"]


def test_few_tensors_are_as_torch_writes_them(tmp_path: Path) -> None:
    write_torch(small_tensors(5), tmp_path / "x", together=True)
    assert len(members(tmp_path / "x")) == 2 * 5 + 3


@pytest.mark.parametrize("damage", ["content", "length"])
def test_damage_among_small_tensors_is_found(tmp_path: Path, damage: str) -> None:
    entry = write_torch(small_tensors(), tmp_path / "x", together=True)
    content = bytearray((tmp_path / "x").read_bytes())
    at = content.index(torch.tensor([299.0]).numpy().tobytes())
    (tmp_path / "x").write_bytes(content[:-1] if damage == "length" else content[:at] + b"\xff" + content[at + 1 :])
    with pytest.raises(CheckpointError, match="x"):
        CheckpointReader(tmp_path, {"x": entry}).content("x")


def test_an_error_of_a_file_names_it_as_text(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        safe_load.Opened(tmp_path)
    assert str(caught.value).endswith(f"'{tmp_path}'") and "PosixPath" not in str(caught.value)
