"""Offloading goes on when any private name of torch that it uses is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import cpu_offload
from accelerate.offload import locked_memory, slot
from accelerate.torch_internals import offloaded_tensors
from tests.unit.torch_names import INTERNALS, hidden_names


def names() -> list[str]:
    """Those of the files that offloading uses."""
    used = ("modules", "offloaded_tensors", "compile")
    sources = "".join((INTERNALS / f"{name}.py").read_text() for name in used)
    return [name for name in hidden_names() if name in sources]


def test_offloading_goes_on_without_any_of_them(tmp_path: Path) -> None:
    hidden = names()
    assert {"_parameters", "_version", "_is_param", "_apply", "_dynamo"} <= set(hidden)
    program = [sys.executable, "-m", "tests.unit.big_modeling.offload_without", str(tmp_path), "nothing", *hidden]
    subprocess.run(program, check=True)
    outcomes = {name: json.loads((tmp_path / name).read_text()) for name in ("nothing", *hidden)}
    usual = outcomes["nothing"]
    assert isinstance(usual, list), usual
    lost = {name: outcome for name, outcome in outcomes.items() if outcome != usual}
    assert not lost, "\n".join(f"without {name}: {outcome}" for name, outcome in lost.items())


def test_small_weights_are_not_kept_where_nobody_counts_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a weight that was written to since would be an old one."""
    for module in (locked_memory, slot):
        monkeypatch.setattr(module, "version_of", lambda tensor: None)
    tensor = torch.ones(5)
    copies = locked_memory.LockedCopies(lambda size: torch.zeros(size, dtype=torch.uint8))
    copies.add([tensor])
    assert copies.find(tensor) is None


def test_a_model_that_cannot_be_kept_from_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `nn.Module._apply` in its place, `to` brings all weights in, and the model computes with them."""
    monkeypatch.setattr("accelerate.hooks.align.replace_apply", lambda module, apply: None)
    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    model: Any = cpu_offload(nn.Sequential(plain), "cpu")
    x = torch.ones(1, 3)
    expected = model(x)
    model.to("cpu")
    assert not model[0].weight.is_meta and torch.equal(model(x), expected)


def test_versions() -> None:
    tensor = torch.ones(2)
    before = offloaded_tensors.version_of(tensor)
    tensor.add_(1)
    assert before is not None and offloaded_tensors.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert offloaded_tensors.version_of(torch.ones(2)) is None
