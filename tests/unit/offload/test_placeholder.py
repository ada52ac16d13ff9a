from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_submodules
from accelerate.offload.module_tensors import has_plain_memory, set_module_tensor_to_device
from accelerate.offload.offloaded_weights import OffloadedWeightsLoader, offload_state_dict
from accelerate.offload.placeholder import OffloadedParameter, OffloadedTensor
from accelerate.offload.slot import Slot

CPU = torch.device("cpu")


def offloaded(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4, dtype=dtype)
    value = layer.weight.detach().clone()
    Slot(layer, "weight", {"weight": value}, "weight", CPU, CPU)
    return layer, value


def test_shows_as_meta() -> None:
    layer, value = offloaded()
    weight = layer.weight
    assert isinstance(weight, OffloadedParameter) and isinstance(weight, nn.Parameter)
    assert weight.device.type == "meta" and weight.is_meta
    assert weight.shape == value.shape and weight.dtype == value.dtype and weight.requires_grad
    assert weight.numel() == 12 and weight.dim() == 2 and len(weight) == 4 and weight.data_ptr() == 0
    assert "meta" in repr(weight)
    assert dict(layer.named_parameters())["weight"] is weight


def test_computes_with_the_value() -> None:
    layer, value = offloaded()
    x = torch.randn(2, 3)
    assert torch.equal(F.linear(x, layer.weight), F.linear(x, value))
    assert torch.equal(x @ layer.weight.T, x @ value.T)
    assert torch.equal(layer.weight[1:], value[1:])
    assert torch.equal(torch.cat([layer.weight, layer.weight]), torch.cat([value, value]))
    assert torch.equal(layer.weight.to(torch.float64).sum(), value.to(torch.float64).sum())
    assert torch.equal(layer.weight.half() * 2, value.half() * 2)
    assert torch.equal(layer.weight.data.norm(), value.norm())
    assert torch.equal(layer.weight.detach().to("cpu"), value)
    assert torch.equal(layer.weight.to(x) + 0, value)
    assert not layer.weight.to(x).is_meta
    assert layer.weight.tolist() == value.tolist()
    assert layer.weight.is_meta


def test_what_only_changes_the_dtype_is_put_off() -> None:
    layer, _ = offloaded()
    weight = layer.weight
    casts = [weight.half(), weight.to(torch.float16), weight.to(dtype=torch.float16), weight.type(torch.float16)]
    for cast in [*casts, weight.type(dtype=torch.float16)]:
        assert type(cast) is OffloadedTensor and cast.is_meta and cast.dtype == torch.float16
    layer.to(torch.float64)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float64
    layer.half()
    assert layer.weight.is_meta and layer.weight.dtype == torch.float16 and isinstance(layer.weight, OffloadedParameter)
    layer.type(torch.float64)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float64
    assert layer.weight.type() == "torch.DoubleTensor"


def test_moving_brings_it_in() -> None:
    layer, value = offloaded()
    layer.to("cpu")
    assert type(layer.weight) is nn.Parameter and torch.equal(layer.weight, value)


def test_gradients() -> None:
    layer, value = offloaded()
    x = torch.randn(2, 3, requires_grad=True)
    F.linear(x, layer.weight).sum().backward()
    other = x.detach().clone().requires_grad_()
    F.linear(other, value).sum().backward()
    assert x.grad is not None and other.grad is not None
    assert torch.equal(x.grad, other.grad)
    assert not layer.weight.detach().requires_grad
    layer.weight.requires_grad_(False)
    assert not layer.weight.requires_grad


def test_writing_changes_the_value_where_it_lies() -> None:
    layer, value = offloaded()
    with torch.no_grad():
        assert layer.weight.zero_() is layer.weight
    assert value.abs().sum() == 0
    with pytest.warns(UserWarning, match="no-op"):  # torch takes it for an empty one
        layer.load_state_dict({"weight": torch.full((4, 3), 2.0), "bias": torch.zeros(4)})
    assert value.tolist() == [[2.0] * 3] * 4
    layer.weight.data[0] = 5.0
    assert value[0].tolist() == [5.0] * 3
    assert layer.weight.is_meta


def test_writing_to_a_file_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(3, 4)
    offload_state_dict(tmp_path, layer.state_dict())
    Slot(layer, "weight", OffloadedWeightsLoader(save_folder=tmp_path), "weight", CPU, CPU)
    assert layer.weight.sum().isfinite()
    with pytest.raises(RuntimeError, match="weight is offloaded to a file, so `copy_` cannot change it"):
        layer.weight.data.copy_(torch.zeros(4, 3))


def test_copies_and_pickles() -> None:
    layer, value = offloaded()
    other = copy.deepcopy(layer)
    assert isinstance(other.weight, OffloadedParameter) and other.weight is not layer.weight
    assert torch.equal(other.weight + 0, value)
    value.zero_()
    assert (other.weight + 0).abs().sum() > 0
    stream = io.BytesIO()
    torch.save(other.weight, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert type(loaded) is nn.Parameter and torch.equal(loaded, other.weight + 0)


def test_attributes_of_a_parameter_are_kept() -> None:
    layer = nn.Linear(3, 4)
    layer.weight.sharded = True  # type: ignore[attr-defined]
    slot = Slot(layer, "weight", {"weight": layer.weight.detach().clone()}, "weight", CPU, CPU)
    assert layer.weight.sharded
    tensor = slot.fill(slot.value())
    assert layer.weight is tensor and layer.weight.sharded and not hasattr(layer.weight, "slot")
    slot.clear(tensor)
    assert layer.weight.is_meta


def test_making_one_anew_gives_a_plain_parameter() -> None:
    layer, value = offloaded()
    made = type(layer.weight)(value, requires_grad=False)
    assert type(made) is nn.Parameter and not made.requires_grad


def test_buffers() -> None:
    layer = nn.BatchNorm1d(4)
    value = torch.randn(4)
    Slot(layer, "running_mean", {"m": value}, "m", CPU, CPU)
    assert type(layer.running_mean) is OffloadedTensor
    assert torch.equal(layer.running_mean + 1, value + 1)


class Twice(nn.Parameter):
    def twice(self) -> torch.Tensor:
        return self * 2


class Marked(nn.Parameter):
    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, mark: int = 0) -> Marked:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.mark = mark  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]


class Kind(torch.Tensor):
    pass


class Seen(nn.Linear):
    seen: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = type(self.weight), getattr(self.weight, "mark", None), self.weight.requires_grad
        return super().forward(x)


@pytest.mark.parametrize("way", ["memory", "disk"])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Twice(torch.ones(2, 2)), (Twice, None, True)),
        (lambda: Marked(torch.ones(2, 2), mark=3), (Marked, 3, False)),
        (lambda: nn.Parameter(torch.ones(2, 2).as_subclass(Kind)), (Kind, None, True)),
    ],
)
def test_parameters_keep_their_class(
    make: Callable[[], nn.Parameter], expected: object, way: str, tmp_path: Path
) -> None:
    layer = Seen(2, 2)
    layer.weight = make()
    x = torch.ones(1, 2)
    output = layer(x)
    assert layer.seen == expected
    cpu_offload(layer, "cpu") if way == "memory" else disk_offload(layer, tmp_path, "cpu")
    copies = [] if expected[0] is Kind else [copy.deepcopy(layer)]  # type: ignore[index]  # torch cannot copy this one
    for model in (layer, *copies):
        model.seen = None
        assert torch.equal(model(x), output)
        assert model.seen == expected
        assert isinstance(model.weight, OffloadedParameter)
    remove_hook_from_submodules(layer)
    assert (type(layer.weight), getattr(layer.weight, "mark", None)) == expected[:2]  # type: ignore[index]


def test_tensors_made_of_others(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def made() -> nn.Linear:
        torch.manual_seed(0)
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach() * 2))
        return layer

    layer = made()
    cpu_offload(layer, "cpu")
    assert not hasattr(layer.weight, "a")  # nothing is held
    found: Any = layer(torch.ones(1, 2))
    expected: Any = made()(torch.ones(1, 2))
    assert type(found) is TwoTensor and torch.equal(found.a, expected.a) and torch.equal(found.b, expected.b)
    with pytest.raises(ValueError, match="weight is a TwoTensor, which consists of several tensors"):
        disk_offload(made(), tmp_path, "cpu")


def test_only_plain_memory_is_taken_by_its_address() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    plain = torch.ones(2, 2)
    complex_ones = torch.ones(2, 2, dtype=torch.complex64)
    assert has_plain_memory(plain) and has_plain_memory(nn.Parameter(plain)) and has_plain_memory(plain.T)
    others = [TwoTensor(plain, plain), plain.as_subclass(Kind), plain.to_sparse(), complex_ones.conj()]
    others.append(complex_ones.conj().imag)
    assert not any(has_plain_memory(other) for other in others)


def test_swapped_tensors_stay() -> None:
    layer = cpu_offload(nn.Linear(2, 2, bias=False), "cpu")
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.zeros(2, 2)))  # type: ignore[arg-type]
    for _ in range(2):
        assert layer(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]


def test_copies_by_to() -> None:
    layer, value = offloaded()
    for made in (layer.weight.to("cpu", copy=True), layer.weight.data.to("cpu", torch.float32, False, True)):
        assert type(made) is torch.Tensor and torch.equal(made, value) and made.data_ptr() != value.data_ptr()
    assert torch.equal(layer.weight.to(torch.float16, copy=True), value.half())
    assert torch.equal(layer.weight.to(dtype=torch.float32, copy=False), value)


def test_a_new_parameter_has_a_value_of_its_own() -> None:
    layer, value = offloaded()
    before = value.clone()
    for make, gradients in (
        (lambda: nn.Parameter(layer.weight), True),
        (lambda: nn.Parameter(layer.weight.data), True),
        (lambda: nn.Parameter(layer.weight.detach(), requires_grad=False), False),
        (lambda: nn.Parameter(layer.weight.double()), True),
        (lambda: nn.Embedding.from_pretrained(layer.weight).weight, False),
        (lambda: nn.Embedding.from_pretrained(layer.weight, freeze=False).weight, True),
    ):
        made: Any = make()
        assert type(made) is nn.Parameter and made.is_leaf and made.requires_grad is gradients and not made.__dict__
        assert torch.equal(made, value.to(made.dtype))
        if gradients:
            made.sum().backward()
            torch.optim.SGD([made], lr=1.0).step()
            assert torch.equal(made, value.to(made.dtype) - 1)
    assert torch.equal(value, before) and isinstance(layer.weight, OffloadedParameter)


def test_a_stand_in_is_cast_alone() -> None:
    layer, value = offloaded()
    set_module_tensor_to_device(layer, "weight", "meta", dtype=torch.float16)
    assert type(layer.weight) is OffloadedParameter and layer.weight.dtype is torch.float16
    assert torch.equal(layer.weight + 0, value.half())


@pytest.mark.parametrize("way", ["overwrite", "swap"])
def test_casts_that_make_parameters_anew(way: str) -> None:
    layer: Any = cpu_offload(nn.Linear(3, 4), "cpu")
    value = layer.state_dict()["weight"]
    choose = getattr(torch.__future__, f"set_{way}_module_params_on_conversion")
    choose(True)
    try:
        layer.double()
    finally:
        choose(False)
    assert layer.weight.is_meta and torch.equal(layer.weight + 0, value.double())
    assert isinstance(layer.weight, OffloadedParameter) and layer(torch.ones(1, 3).double()).dtype is torch.float64
