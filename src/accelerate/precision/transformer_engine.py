"""fp8 with TransformerEngine. Training with it is not part of this version; what needs it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from accelerate.available import is_transformer_engine_available
from accelerate.errors import NotYetSupported


def _require(what: str) -> None:
    if not is_transformer_engine_available():
        raise ImportError(f"`{what}` needs TransformerEngine, which is not installed.")


def _not_yet(what: str) -> NotYetSupported:
    _require(what)
    return NotYetSupported(f"fp8 with TransformerEngine (`{what}`)", "use mixed_precision='bf16'.")


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a part of the model is a layer of TransformerEngine."""
    _require("has_transformer_engine_layers")
    import transformer_engine.pytorch as te

    return any(isinstance(module, (te.LayerNorm, te.Linear, te.TransformerLayer)) for module in model.modules())


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Put layers of TransformerEngine in place of torch's, or the other way round."""
    raise _not_yet("convert_model")


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A forward that computes in fp8: in training, or always."""
    raise _not_yet("contextual_fp8_autocast")


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Have the forward of a model compute in fp8."""
    raise _not_yet("apply_fp8_autowrap")
