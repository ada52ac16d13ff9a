"""Models with thousands of parts: the work grows as they do, and not with its square."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.torch_internals.modules import load_state


class Counted(str):
    """A name that counts how often it is looked at."""

    looks = 0

    def startswith(self, *args: Any) -> bool:
        Counted.looks += 1
        return super().startswith(*args)

    def partition(self, *args: Any) -> tuple[str, str, str]:
        Counted.looks += 1
        return super().partition(*args)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3))
        self.register_module("nothing", None)
        self.tied = self.rows[0]
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


def test_weights_are_taken_as_torch_does_it() -> None:
    torch.manual_seed(0)
    source, ours, theirs = Net(), Net(), Net()
    for tensor in source.state_dict().values():
        tensor.copy_(torch.rand_like(tensor, dtype=torch.float32) * 9)
    load_state(ours, source.state_dict())
    theirs.load_state_dict(source.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    load_state(ours, {"kept": torch.ones(2), "unknown.a": torch.ones(1)}, strict=False)
    assert ours.kept.tolist() == [1, 1]
    load_state(ours, {"kept": (new := torch.full((2,), 3.0))}, strict=False, assign=True)
    assert ours.kept is new


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("rows.1.0.weight"), r"missing \['rows.1.0.weight'\]"),
        (lambda state: state.update({"rows.7.weight": torch.ones(1)}), r"unknown \['rows.7.weight'\]"),
        (lambda state: state.update({"more": torch.ones(1)}), r"unknown \['more'\]"),
        (lambda state: state.update(kept=torch.ones(3)), "size mismatch for kept"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, said: str) -> None:
    state = Net().state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=said):
        load_state(Net(), state)


def test_each_name_is_looked_at_a_few_times() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(500)))
    state = {Counted(name): value for name, value in model.state_dict().items()}
    Counted.looks = 0
    load_state(model, state)
    assert 0 < Counted.looks <= 6 * len(state)


def test_an_optimizer_with_many_small_tensors(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x" / "optimizer.bin") as archive:
        assert sum("/data/" in name for name in archive.namelist()) == 1
    optimizer.step()
    accelerator.load_state(tmp_path / "x")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    states = list(optimizer.state.values())
    assert len(states) == 200 and all(state["step"].item() == 1 for state in states)
    assert len({state["exp_avg"].untyped_storage().data_ptr() for state in states}) == 200
    assert all(group["params"] == list(model.parameters()) for group in optimizer.param_groups)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(torch.load(tmp_path / "x" / "optimizer.bin", weights_only=True))
    assert all(torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"]) for p in model.parameters())
