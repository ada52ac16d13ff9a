"""Writing to an offloaded weight: every way changes it, or says why not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload

WAYS: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda w: w.zero_(),
    "data": lambda w: w.data.zero_(),
    "detach": lambda w: w.detach().zero_(),
    "copy_": lambda w: w.copy_(torch.zeros(3, 3)),
    "function": lambda w: torch.zero_(w),
    "keyword": lambda w: torch.Tensor.mul_(w, other=0),
    "all by keyword": lambda w: torch.clamp_(input=w, min=0, max=0),
    "init.zeros_": lambda w: nn.init.zeros_(w),
    "init.constant_": lambda w: nn.init.constant_(w, 0.0),
    "init.uniform_": lambda w: nn.init.uniform_(w, 0, 1e-9),
    "init.normal_": lambda w: nn.init.normal_(w, 0, 0),
    "init.trunc_normal_": lambda w: nn.init.trunc_normal_(w, 0, 1e-9),
    "init.kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=1e9),
    "init.xavier_uniform_": lambda w: nn.init.xavier_uniform_(w, gain=1e-9),
    "init.orthogonal_": lambda w: nn.init.orthogonal_(w, gain=0),
    "init.sparse_": lambda w: nn.init.sparse_(w, 0.5, std=0),
    "setitem": lambda w: w.__setitem__(slice(None), 0.0),
    "imul": lambda w: w.__imul__(0),
    "out": lambda w: torch.mul(w.detach(), 0, out=w.data),
    "out of two": lambda w: torch.frexp(torch.zeros(3, 3), out=(w.data, torch.empty(3, 3, dtype=torch.int32))),
    "_foreach_zero_": lambda w: torch._foreach_zero_([w]),
    "_foreach_mul_": lambda w: torch._foreach_mul_([w.data, torch.ones(2)], 0.0),
    "_foreach_copy_": lambda w: torch._foreach_copy_([w], [torch.zeros(3, 3)]),
    "inplace": lambda w: nn.functional.threshold(w, 1e9, 0.0, inplace=True),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.zeros(9, dtype=w.dtype), [w]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", list(WAYS))
def test_in_memory(way: str, dtype: torch.dtype) -> None:
    """In another dtype the value that is computed with is a copy, as it is on a GPU."""
    torch.manual_seed(0)
    model = cpu_offload(nn.Linear(3, 3), "cpu")
    model.to(dtype)
    with torch.no_grad():
        WAYS[way](model.weight)
    change = model(torch.ones(1, 3, dtype=dtype)) - model.bias
    assert change.abs().max() < 1e-5
    assert model.state_dict()["weight"].abs().max() < 1e-5


@pytest.mark.parametrize("way", list(WAYS))
def test_on_disk(way: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    x = torch.ones(1, 3)
    expected = model(x)
    model = disk_offload(model, tmp_path, "cpu")
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"^0\.0\.weight is offloaded to a file, so `.*` cannot change it"),
    ):
        WAYS[way](model[0][0].weight)  # type: ignore[index]
    assert torch.equal(model(x), expected)


def test_random_values_are_those_of_a_plain_model() -> None:
    plain, offloaded = nn.Linear(3, 3), cpu_offload(nn.Linear(3, 3), "cpu")
    for model in (plain, offloaded):
        torch.manual_seed(1)
        model.reset_parameters()  # type: ignore[operator]
    assert all(torch.equal(offloaded.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_initializers_that_leave_empty_tensors_alone() -> None:
    """Those of nn.init that would take an offloaded weight for one, and all others are as they were."""
    plain, offloaded = nn.Conv1d(4, 4, 3), cpu_offload(nn.Conv1d(4, 4, 3), "cpu")
    for model in (plain, offloaded):
        assert nn.init.dirac_(tensor=model.weight, groups=2) is model.weight
    assert torch.equal(offloaded.state_dict()["weight"], plain.weight)
    empty = torch.empty(4, 4, 3, device="meta")
    assert nn.init.dirac_(empty) is empty and nn.init.orthogonal_(empty) is empty
    assert pickle.loads(pickle.dumps(nn.init.dirac_)) is nn.init.dirac_


def test_data_of_another_kind_is_refused() -> None:
    model = cpu_offload(nn.Sequential(nn.Linear(3, 3)), "cpu")
    for value in (torch.zeros(3), torch.zeros(3, 3, dtype=torch.float16)):
        with pytest.raises(RuntimeError, match=r"0\.weight is offloaded.* \(3, 3\) and torch\.float32"):
            model[0].weight.data = value  # type: ignore[index]


def test_data_of_another_shape_and_without_values_is_refused() -> None:
    """What `resize_token_embeddings` of transformers does: it makes the new weight on the device of the old one."""
    model: Any = cpu_offload(nn.Sequential(nn.Embedding(4, 3)), "cpu")
    with pytest.raises(RuntimeError, match=r"0\.weight is offloaded.* \(4, 3\) .*: remove the model.s hooks first"):
        model[0].weight.data = torch.empty(6, 3, device="meta")
    assert model(torch.tensor([3])).shape == (1, 3) and model[0].weight.shape == (4, 3)


def test_data_of_another_offloaded_weight_is_copied() -> None:
    model: Any = cpu_offload(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "cpu")
    model[0].weight.data = model[1].weight.data
    state = model.state_dict()
    assert torch.equal(state["0.weight"], state["1.weight"])
    with torch.no_grad():
        model[1].weight.zero_()
    assert state["0.weight"].abs().sum() > 0
