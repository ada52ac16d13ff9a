"""How the weights of a model are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.config.enums import CustomDtype

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass
class BnbQuantizationConfig:
    """Weights in 8 or 4 bits with `bitsandbytes`.

    load_in_8bit, load_in_4bit: one of them. llm_int8_threshold: features beyond it are computed in 16 bits, under 8.
    bnb_4bit_quant_type: "fp4" or "nf4". bnb_4bit_use_double_quant: quantize the scales, too. bnb_4bit_compute_dtype:
    what is computed in, as "fp32", "fp16", "bf16" or a torch dtype. torch_dtype: the dtype of all that is not
    quantized, likewise; by default that of computing, and with 8 bits "fp16". skip_modules: names of modules that are
    not quantized; by default the output and what is tied to it. keep_in_fp32_modules: names of modules that are not
    quantized and stay float32.
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
            both = "both" if self.load_in_8bit else "neither"
            raise ValueError(f"A model is quantized to 8 or to 4 bits, and {both} was asked for: set one of the two.")
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
