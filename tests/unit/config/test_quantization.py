from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.utils import BnbQuantizationConfig, CustomDtype


def test_defaults() -> None:
    eight = BnbQuantizationConfig(load_in_8bit=True)
    assert (eight.torch_dtype, eight.target_dtype, eight.llm_int8_threshold) == (torch.float16, torch.int8, 6.0)
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16", torch_dtype=torch.float32)
    assert four.bnb_4bit_compute_dtype == torch.bfloat16 and four.torch_dtype == torch.float32
    assert BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16").torch_dtype == torch.bfloat16
    assert four.target_dtype is CustomDtype.INT4 and four.bnb_4bit_quant_type == "fp4"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "neither was set"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "both were set"),
        ({"load_in_8bit": 1}, "load_in_8bit of BnbQuantizationConfig is 1: give True or False"),
        ({"load_in_8bit": True, "llm_int8_threshold": "a"}, "give a number"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp8"}, "is 'fp8': give 'fp4' or 'nf4'"),
        ({"load_in_4bit": True, "torch_dtype": "fp8"}, "torch_dtype of BnbQuantizationConfig is 'fp8'"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "is 'head': give a list of names"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BnbQuantizationConfig(**settings)


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.quantization import bnb

    monkeypatch.setattr(bnb, "is_8bit_bnb_available", lambda: False)
    with pytest.raises(ImportError, match="pip install"):
        bnb.load_and_quantize_model(torch.nn.Linear(2, 2), BnbQuantizationConfig(load_in_8bit=True))
