"""Stand-ins for Transformer Engine and MS-AMP, which cannot be installed here: the calls that they document, recorded.

What these tests show is which calls are made, and when; not that the libraries do what they say.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

CALLS: list[Any] = []


class Linear(nn.Linear):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype)
        self.use_bias = bias
        if not bias:  # it has an empty tensor then, which is no parameter
            del self._parameters["bias"]
            vars(self)["bias"] = torch.Tensor()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        CALLS.append("linear")
        return nn.functional.linear(input, self.weight, self.bias if self.use_bias else None)


class LayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape: Any, eps: float = 1e-5, params_dtype: Any = None) -> None:
        super().__init__(normalized_shape, eps=eps, dtype=params_dtype)


class TransformerLayer(nn.Module):
    pass


class Format(enum.Enum):
    HYBRID = "hybrid"
    E4M3 = "e4m3"


@dataclasses.dataclass
class DelayedScaling:
    """As in releases from 1.8 on: without `interval`."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: Any = (False, False, False)


@dataclasses.dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3


@contextmanager
def fp8_autocast(enabled: bool = False, fp8_recipe: Any = None) -> Iterator[None]:
    CALLS.append((enabled, fp8_recipe))
    yield
    CALLS.append("left")


class LBAdamW(torch.optim.AdamW):
    """What MS-AMP makes of an optimizer."""


def initialize(model: nn.Module, optimizer: Any, opt_level: str = "O1") -> tuple[nn.Module, Any]:
    CALLS.append(opt_level)
    return model, LBAdamW(model.parameters(), lr=optimizer.param_groups[0]["lr"])


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both be importable, and a CPU pass for a GPU that computes in fp8."""
    from accelerate.precision.fp8 import Fp8

    CALLS.clear()
    modules = {name: types.ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch", "msamp")}
    modules |= {
        name: types.ModuleType(name) for name in ("transformer_engine.common", "transformer_engine.common.recipe")
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(modules["transformer_engine.pytorch"]).update(
        Linear=Linear, LayerNorm=LayerNorm, TransformerLayer=TransformerLayer, fp8_autocast=fp8_autocast
    )
    vars(modules["transformer_engine.common.recipe"]).update(
        Format=Format, DelayedScaling=DelayedScaling, MXFP8BlockScaling=MXFP8BlockScaling
    )
    vars(modules["transformer_engine.common"]).update(recipe=modules["transformer_engine.common.recipe"])
    vars(modules["transformer_engine"]).update(pytorch=modules["transformer_engine.pytorch"])
    vars(modules["msamp"]).update(initialize=initialize)
    import accelerate.available as available
    import accelerate.precision.transformer_engine as ours

    for place in (available, ours):
        monkeypatch.setattr(place, "is_transformer_engine_available", lambda: True)
    monkeypatch.setattr("accelerate.state.accelerator.is_fp8_available", lambda: True)
    monkeypatch.setattr(Fp8, "lacks", classmethod(lambda cls, device: None))
    for kind in Fp8.__subclasses__():
        monkeypatch.setattr(kind, "lacks", classmethod(lambda cls, device: None))
