"""Engines on several processes where torch no longer has a private name: what is lost is said, the rest goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import accelerate.checkpoint.agreement
import accelerate.strategies.flat
import accelerate.strategies.fsdp2
from accelerate import Accelerator, PartialState
from accelerate.torch_internals import mesh as usual
from tests.harness import run_world
from tests.unit.torch_names import without
from tests.world.test_fsdp_checkpoints import _prepared, _train


def _hide(engine: str, name: str) -> None:
    """Only ever in a process of its own."""
    if engine == "fsdp2":
        accelerate.strategies.fsdp2.WaitingGradients = without(name, "fsdp2").WaitingGradients  # type: ignore[misc]
    else:
        accelerate.strategies.flat.flat_parameters = without(name, "fsdp1").flat_parameters


def _saves_between_windows(engine: str, name: str, folder: str) -> str:
    _hide(engine, name)
    accelerator, model, optimizer = _prepared(engine, flat=True)
    accelerator.gradient_accumulation_steps = 3
    _train(accelerator, model, optimizer, range(3))
    accelerator.save_state(f"{folder}/between")
    losses = _train(accelerator, model, optimizer, range(3, 6))
    accelerator.load_state(f"{folder}/between")
    assert _train(accelerator, model, optimizer, range(3, 6)) == losses
    _train(accelerator, model, optimizer, range(6, 8))
    with pytest.raises(RuntimeError) as caught:
        accelerator.save_state(f"{folder}/inside")
    assert not Path(folder, "inside").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("flat", "_get_unflat_views"),
        ("fsdp1", "_unpadded_unsharded_size"),
        ("fsdp2", "_get_fsdp_state"),
    ],
)
def test_no_checkpoint_inside_a_window(engine: str, name: str, tmp_path: Path) -> None:
    for message in run_world(_saves_between_windows, 2, engine, name, str(tmp_path)):
        assert name in message and "a checkpoint inside an accumulation window" in message
        assert "save after `optimizer.step()`" in message


def _refuses_version_1(name: str) -> str:
    _hide("flat", name)
    with pytest.raises(RuntimeError) as caught:
        _prepared("flat", flat=True)
    message = str(caught.value)
    del caught  # which holds the model that was being wrapped
    PartialState().wait_for_everyone()
    return message


@pytest.mark.parametrize("name", ["_handle", "_param_infos"])
def test_no_version_1(name: str) -> None:
    for message in run_world(_refuses_version_1, 2, name):
        assert name in message and "which FSDP version 1 needs: use version 2 (fsdp_version=2)." in message


def _pieces_worked_out() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    hidden = without("_utils", "mesh")
    for shape in ((5, 3), (1, 7), (8, 8), (2, 0)):
        for first in (Shard(0), Shard(1), Replicate()):
            for second in (Shard(0), Shard(1), Replicate()):
                where = (torch.Size(shape), mesh, (first, second))
                sizes, offsets = usual.local_shape_and_offset(*where)
                found, starts = hidden.local_shape_and_offset(*where)
                assert list(found) == list(sizes), where
                if math.prod(sizes):  # where nothing is, it may begin anywhere
                    assert list(starts) == list(offsets), where
    with pytest.raises(RuntimeError, match="a tensor that is spread as"):
        hidden.local_shape_and_offset(torch.Size((4, 4)), mesh, (Partial(), Replicate()))
    with pytest.raises(RuntimeError, match="joining the axes of a mesh"):
        without("_flatten", "mesh").join_axes(mesh, "both")


def test_pieces_of_tensors() -> None:
    run_world(_pieces_worked_out, 4)


def _saves_without_a_store(folder: str) -> int:
    accelerate.checkpoint.agreement.default_store = without("_get_default_store", "process_groups").default_store
    accelerator = Accelerator()
    model: Any = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def test_all_are_taken_to_call_a_save(tmp_path: Path) -> None:
    assert run_world(_saves_without_a_store, 2, str(tmp_path / "state")) == [2, 2]
