"""Folders of shards: what is in them is read, and never run."""

from __future__ import annotations

import enum
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from accelerate.checkpoint import sharded_state
from accelerate.checkpoint.merge import merge_fsdp_weights
from accelerate.errors import CheckpointError

WEIGHTS = {"weight": torch.arange(6.0).reshape(2, 3), "step": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "pytorch_model_fsdp_0"
    path.mkdir()
    sharded_state.Shards(path.name, "model", WEIGHTS).write(path.parent)
    return path


def _read(folder: Path) -> Any:
    return sharded_state.read(folder, sharded_state.whole)


def _merged(folder: Path) -> Any:
    return merge_fsdp_weights(str(folder), str(folder.parent / "merged"))


def _merged_torch(folder: Path) -> Any:
    return merge_fsdp_weights(str(folder), str(folder.parent / "merged"), safe_serialization=False)


READERS = [_read, _merged, _merged_torch]


def test_what_was_written_is_read(folder: Path) -> None:
    found = _read(folder)
    assert found["step"] == 3 and torch.equal(found["weight"], WEIGHTS["weight"])
    _merged_torch(folder)
    found = torch.load(folder.parent / "merged" / "pytorch_model.bin", weights_only=True)
    assert found["step"] == 3 and torch.equal(found["weight"], WEIGHTS["weight"])


def _asking_for(module: str, name: str, *arguments: Any) -> bytes:
    """A pickle that calls something, which may be named by a path of attributes."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93" + pickle.dumps(arguments, protocol=2)[2:-1] + b"R."


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("subprocess", "Popen"),
        # A class that is found by way of what an allowed module has imported.
        ("torch.distributed.checkpoint.metadata", "os.sys.modules"),
        ("torch.distributed.checkpoint.filesystem", "torch._strobelight.cli_function_profiler.subprocess.Popen"),
        ("torch.distributed.checkpoint.filesystem", "ThreadPoolExecutor"),
        # One that does more than to hold values.
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
    ],
)
def test_what_describes_the_shards_is_not_run(
    folder: Path, reader: Callable[[Path], Any], module: str, name: str
) -> None:
    evil = folder.parent / "evil"
    (folder / ".metadata").write_bytes(_asking_for(module, name, ["touch", str(evil)]))
    with pytest.raises(CheckpointError, match=rf"\.metadata .*{module}\.{name}"):
        reader(folder)
    assert not evil.exists()


class _AsPython311(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do, which Debian 12 has."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_enumerations_as_an_older_python_writes_them(folder: Path) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    with open(folder / ".metadata", "wb") as file:
        _AsPython311(file, protocol=4).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    test_what_was_written_is_read(folder)


@pytest.mark.parametrize("arguments", [([], "append"), ("text", "join")])
def test_nothing_else_is_reached_through_attributes(folder: Path, arguments: tuple[Any, str]) -> None:
    (folder / ".metadata").write_bytes(_asking_for("builtins", "getattr", *arguments))
    with pytest.raises(CheckpointError, match=r"it refers to builtins\.getattr of .*, which is not run"):
        _read(folder)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@pytest.mark.parametrize("reader", [_read, _merged_torch])
def test_what_is_in_the_shards_is_not_run(
    folder: Path, reader: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    memory = io.BytesIO()
    torch.save(Evil(), memory)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    [(_, place)] = [item for item in metadata.storage_data.items() if item[0].fqn == "model.step"]
    content = (folder / place.relative_path).read_bytes()
    place.offset, place.length = len(content), len(memory.getvalue())
    (folder / place.relative_path).write_bytes(content + memory.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        reader(folder)
    assert not (folder.parent / "evil").exists()
