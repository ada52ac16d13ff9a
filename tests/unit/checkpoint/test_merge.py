"""One file of weights from a checkpoint in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from accelerate.checkpoint import merge
from accelerate.checkpoint.merge import merge_fsdp_weights
from accelerate.errors import CheckpointError
from accelerate.state import PartialState
from tests.harness import run_world


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    return model.to(torch.bfloat16)


def _save_sharded(folder: str) -> None:
    PartialState()
    model = _model()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    merge_fsdp_weights(folder, str(Path(folder).with_name("by-all")))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose model two ranks hold in shards."""
    folder = tmp_path_factory.mktemp("sharded") / "pytorch_model_fsdp_0"
    run_world(_save_sharded, 2, str(folder))
    return folder


def same(found: dict[str, Any]) -> bool:
    wanted = _model().state_dict()
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


@pytest.mark.parametrize("group", [1, 1 << 28])
def test_safetensors(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    monkeypatch.setattr(merge, "GROUP_BYTES", group)
    merge_fsdp_weights(str(sharded.parent), str(tmp_path / "out"))
    assert same(load_file(tmp_path / "out" / "model.safetensors"))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_all_ranks_may_call_it(sharded: Path) -> None:
    assert same(load_file(sharded.with_name("by-all") / "model.safetensors"))


def test_torch_file(sharded: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(str(sharded), str(tmp_path), safe_serialization=False)
    assert same(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # said by torch where no processes were asked for
def test_the_shards_are_removed_when_all_is_written(tmp_path: Path) -> None:
    dcp.save({"model": {"a": torch.ones(3), "n": 4}}, checkpoint_id=tmp_path / "shards")
    merge_fsdp_weights(str(tmp_path / "shards"), str(tmp_path / "out"), remove_checkpoint_dir=True)
    assert not (tmp_path / "shards").exists()
    # what is no tensor has no place in such a file
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a"}


def test_a_folder_without_shards_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no shards of a model"):
        merge_fsdp_weights(str(tmp_path), str(tmp_path / "out"))
