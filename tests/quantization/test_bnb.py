"""Models in 8 and 4 bits, with the real bitsandbytes, on the CPU: `make quantization`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights
from accelerate.available import is_4bit_bnb_available
from accelerate.utils import BnbQuantizationConfig, has_4bit_bnb_layers, load_and_quantize_model
from accelerate.utils.bnb import (
    get_keys_to_not_convert,
    get_parameter_device,
    get_quantized_model_device_map,
    replace_with_bnb_layers,
)
from accelerate.utils.modeling import set_module_tensor_to_device

if not is_4bit_bnb_available():
    if os.environ.get("REQUIRE_QUANTIZATION"):
        raise ImportError("bitsandbytes is not installed")
    pytest.skip("bitsandbytes is not installed", allow_module_level=True)

TOKENS = torch.arange(10)
EIGHT = {"load_in_8bit": True, "torch_dtype": "fp32"}
FOUR = {"load_in_4bit": True, "torch_dtype": "fp32", "bnb_4bit_compute_dtype": "fp32"}
KINDS: list[dict[str, Any]] = [
    EIGHT,
    FOUR,
    {**FOUR, "bnb_4bit_quant_type": "nf4"},
    {**FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.first = nn.Linear(64, 64)
        self.middle = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.first(self.embed(tokens))))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def saved(model: nn.Module, folder: Path, safe: bool = True) -> Path:
    state = model.state_dict()
    if safe:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return folder


def empty() -> Net:
    with init_empty_weights():
        return Net()


def distance(model: nn.Module, other: nn.Module) -> float:
    with torch.no_grad():
        return float((model(TOKENS) - other(TOKENS)).abs().max() / other(TOKENS).abs().max())


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu"}], ids=str)
def test_loaded_and_quantized(model: Net, tmp_path: Path, kind: dict[str, Any], device_map: Any, safe: bool) -> None:
    config = BnbQuantizationConfig(**kind)
    found = load_and_quantize_model(empty(), config, saved(model, tmp_path, safe), device_map)
    name, dtype = ("Int8Params", torch.int8) if config.load_in_8bit else ("Params4bit", torch.uint8)
    for layer in (found.first, found.middle[0], found.middle[2]):
        assert type(layer.weight).__name__ == name and layer.weight.dtype == dtype
    assert type(found.head) is nn.Linear and torch.equal(found.head.weight, model.head.weight)
    assert has_4bit_bnb_layers(found) is config.load_in_4bit
    assert 0 < distance(found, model) < (0.02 if config.load_in_8bit else 0.3)


@pytest.mark.parametrize("kind", [EIGHT, FOUR], ids=str)
def test_weights_that_are_there_give_the_same(model: Net, tmp_path: Path, kind: dict[str, Any]) -> None:
    loaded = load_and_quantize_model(empty(), BnbQuantizationConfig(**kind), saved(model, tmp_path))
    quantized = load_and_quantize_model(model, BnbQuantizationConfig(**kind))
    assert distance(loaded, quantized) == 0


def test_eight_bits_on_disk(model: Net, tmp_path: Path) -> None:
    device_map = {"embed": "cpu", "first": "disk", "middle": "disk", "head": "cpu"}
    config = BnbQuantizationConfig(**EIGHT)
    found = load_and_quantize_model(
        empty(), config, saved(model, tmp_path), device_map, offload_folder=tmp_path / "disk"
    )
    assert {"first.weight.dat", "first.SCB.dat", "middle.2.SCB.dat"} <= set(os.listdir(tmp_path / "disk"))
    assert (tmp_path / "disk" / "first.weight.dat").stat().st_size == 64 * 64
    whole = load_and_quantize_model(empty(), BnbQuantizationConfig(**EIGHT), tmp_path)
    assert distance(found, whole) == 0
    assert distance(found, whole) == 0, "and a second time"


def test_four_bits_beside_the_disk(model: Net, tmp_path: Path) -> None:
    """Without a GPU only what is on disk is left alone, and a config may be used again."""
    places = {"": "cpu", "first": "disk"}
    config = BnbQuantizationConfig(**FOUR)
    saved(model, tmp_path)
    found = load_and_quantize_model(empty(), config, tmp_path, places, offload_folder=tmp_path / "disk")
    assert type(found.first) is nn.Linear and type(found.middle[0]).__name__ == "Linear4bit"
    assert 0 < distance(found, model) < 0.3
    assert config == BnbQuantizationConfig(**FOUR), "as it was"
    again = load_and_quantize_model(empty(), config, tmp_path, {"": "cpu"})
    assert type(again.first).__name__ == "Linear4bit"


def test_a_weight_that_is_quantized_already(model: Net) -> None:
    config = BnbQuantizationConfig(**EIGHT)
    found = load_and_quantize_model(model, config)
    values, scales = found.first.weight.data.clone(), found.first.weight.SCB.clone()
    with torch.no_grad():
        before = found(TOKENS)
    set_module_tensor_to_device(found, "first.weight", "meta")
    assert found.first.weight.is_meta and found.first.state.SCB is None
    set_module_tensor_to_device(found, "first.weight", "cpu", value=values, fp16_statistics=scales)
    assert found.first.weight.dtype == torch.int8
    with torch.no_grad():
        assert torch.equal(found(TOKENS), before)


def test_which_layers(model: Net) -> None:
    assert get_keys_to_not_convert(model) == ["head"]
    model.head.weight = model.embed.weight
    assert get_keys_to_not_convert(model) == ["embed", "head"]
    config = BnbQuantizationConfig(**EIGHT)
    replaced = replace_with_bnb_layers(Net(), config, modules_to_not_convert=["head", "middle.0"])
    names = {name for name, module in replaced.named_modules() if type(module).__name__ == "Linear8bitLt"}
    assert names == {"first", "middle.2"}
    assert get_parameter_device(replaced) == torch.device("cpu") and get_parameter_device(nn.ReLU()) is None


def test_skipped_and_kept(model: Net, tmp_path: Path) -> None:
    config = BnbQuantizationConfig(
        load_in_8bit=True, torch_dtype="fp16", skip_modules=["middle"], keep_in_fp32_modules=["head"]
    )
    found = load_and_quantize_model(empty(), config, saved(model, tmp_path))
    assert type(found.middle[0]) is nn.Linear and found.middle[0].weight.dtype == torch.float16
    assert found.head.weight.dtype == torch.float32 and found.first.weight.dtype == torch.int8


def test_maps_count_quantized_sizes() -> None:
    config = BnbQuantizationConfig(**EIGHT, skip_modules=["head"])
    limits = {0: 14_500, "cpu": 100_000}
    found = get_quantized_model_device_map(empty(), config, "sequential", limits)
    assert found["first"] == 0, "4 KiB rather than 16"
    with pytest.raises(ValueError, match="which weights in 4 bits cannot be"):
        get_quantized_model_device_map(empty(), BnbQuantizationConfig(**FOUR), {"first": "cpu", "": 0})
    with pytest.raises(ValueError, match="device_map is 'odd'"):
        get_quantized_model_device_map(empty(), config, "odd")


def test_no_weights_at_all() -> None:
    with pytest.raises(RuntimeError, match="give the weights_location"):
        load_and_quantize_model(empty(), BnbQuantizationConfig(**EIGHT))
