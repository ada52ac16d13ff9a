from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.utils import CustomDtype, modeling
from tests.unit.big_modeling.models import Net


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.float8_e4m3fn, 1),
        (torch.complex64, 8),
        (torch.bool, 0.125),
        (torch.uint4, 0.5),
        (CustomDtype.FP8, 1),
        (CustomDtype.INT4, 0.5),
        (CustomDtype.INT2, 0.25),
        ("float16", 2),
    ],
)
def test_bytes_of_a_number(dtype: object, size: float) -> None:
    assert modeling.dtype_byte_size(dtype) == size


def test_no_dtype() -> None:
    with pytest.raises(ValueError, match="3 is not a dtype"):
        modeling.dtype_byte_size(3)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GB", 10**9), ("1GiB", 2**30), ("1.5 MB", 1_500_000), ("3kib", 3072), ("1Gb", 125_000_000), (7, 7)],
)
def test_sizes_as_text(text: object, size: int) -> None:
    assert modeling.convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["500", "-1GB", "many", "1GBit"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="as in '5GB'"):
        modeling.convert_file_size_to_int(text)


def test_sizes_of_modules() -> None:
    model = Net(blocks=1)
    sizes = modeling.compute_module_sizes(model)
    block = 4 * (16 + 4 + 16)
    assert sizes["blocks.0"] == sizes["blocks"] == block
    assert sizes["blocks.0.first"] == 80 and sizes["blocks.0.first.bias"] == 16
    assert sizes["norm"] == 4 * 16 + 8 and sizes["embed"] == 128
    assert "head" not in sizes, "a tied parameter counts once"
    assert sizes[""] == 128 + block + 72 + 4
    half = modeling.compute_module_sizes(model, dtype="float16")
    assert half["norm"] == 2 * 16 + 8, "whole numbers are not cast"
    assert modeling.compute_module_sizes(model, dtype=torch.float64)["embed"] == 128, "nothing becomes wider"
    special = modeling.compute_module_sizes(model, dtype=torch.float16, special_dtypes={"embed.weight": torch.float32})
    assert special["embed"] == 128 and special["blocks"] == block / 2
    buffers = modeling.compute_module_sizes(model, buffers_only=True)
    assert buffers[""] == 4 + 4 * 8 + 8 == modeling.compute_module_total_buffer_size(model)


def test_leaves_and_biggest_layers() -> None:
    model = Net(blocks=2)
    sizes = modeling.compute_module_sizes(model)
    leaves = modeling.get_module_leaves(sizes)
    assert "embed.weight" in leaves and "embed" not in leaves and "scale" in leaves
    parts = list(model.named_children())
    assert modeling.get_max_layer_size(parts, sizes, []) == (128, ["embed"])
    assert modeling.get_max_layer_size(parts, sizes, ["Block"]) == (144, ["blocks.0", "blocks.1"])
    model._no_split_modules = ["Block"]
    assert modeling.calculate_maximum_sizes(model) == (sizes[""], (144, ["blocks.0", "blocks.1"]))


def test_memory_of_a_tensor() -> None:
    tensor = torch.zeros(4)
    assert modeling.id_tensor_storage(tensor) == modeling.id_tensor_storage(tensor[2:])
    assert modeling.id_tensor_storage(tensor) != modeling.id_tensor_storage(torch.zeros(4))
    assert modeling.id_tensor_storage(tensor)[2] == 16


def test_a_model_of_nothing() -> None:
    assert modeling.compute_module_sizes(nn.Module())[""] == 0
    assert modeling.calculate_maximum_sizes(nn.Module()) == (0, (0, []))
