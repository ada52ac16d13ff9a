"""How the weights of a model are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.config.enums import CustomDtype

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass
class BnbQuantizationConfig:
    """Quantize the weights of a model to 8 or 4 bits with `bitsandbytes`.

    Args:
        load_in_8bit: quantize to 8 bits. Exactly one of this and `load_in_4bit` is set.
        llm_int8_threshold: with 8 bits, features beyond this value are computed in 16 bits.
        load_in_4bit: quantize to 4 bits.
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: quantize the scales as well.
        bnb_4bit_compute_dtype: the dtype of computation: "fp32", "fp16", "bf16" or a torch dtype.
        torch_dtype: the dtype of everything that is not quantized, given in the same way. By default that of
            computation, and "fp16" with 8 bits.
        skip_modules: names of modules that are not quantized. By default the output layer and what is tied to it.
        keep_in_fp32_modules: names of modules that are not quantized and stay in float32.

    Example:
        ```python
        config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16")
        model = load_and_quantize_model(model, config, weights_location="checkpoint/", device_map="auto")
        ```
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        import torch

        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        if self.load_in_8bit == self.load_in_4bit:
            both = "both were" if self.load_in_8bit else "neither was"
            raise ValueError(
                f"A model is quantized to 8 or to 4 bits, but {both} set: set one of load_in_8bit and load_in_4bit."
            )
        self._check("llm_int8_threshold", isinstance(self.llm_int8_threshold, (int, float)), "a number")
        self._check("bnb_4bit_quant_type", self.bnb_4bit_quant_type in ("fp4", "nf4"), "'fp4' or 'nf4'")
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            self._check(name, value is None or isinstance(value, list), "a list of names")
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else "fp16"
        for name in ("bnb_4bit_compute_dtype", "torch_dtype"):
            value = getattr(self, name)
            self._check(
                name, isinstance(value, torch.dtype) or value in _DTYPES, "'fp32', 'fp16', 'bf16' or a torch dtype"
            )
            setattr(self, name, value if isinstance(value, torch.dtype) else getattr(torch, _DTYPES[value]))
        # What a weight counts as when devices are filled.
        self.target_dtype: Any = CustomDtype.INT4 if self.load_in_4bit else torch.int8

    def _check(self, name: str, right: bool, wanted: str) -> None:
        if not right:
            raise ValueError(f"{name} of BnbQuantizationConfig is {getattr(self, name)!r}: give {wanted}.")
