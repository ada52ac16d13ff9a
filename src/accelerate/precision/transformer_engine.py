"""fp8 with Transformer Engine, whose layers come in place of torch's and compute in fp8 within its own context."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerate.available import is_transformer_engine_available
from accelerate.bundle import Bundle
from accelerate.config.enums import FP8BackendType
from accelerate.config.fp8 import TERecipeKwargs
from accelerate.devices import Device
from accelerate.precision.fp8 import PIECE, Fp8
from accelerate.torch_internals.compile import original_of


class TransformerEngine(Fp8):
    fp8_backend = FP8BackendType.TE
    title = "Transformer Engine"
    package = "transformer-engine"
    recipe_kind = TERecipeKwargs
    recipe: TERecipeKwargs

    @classmethod
    def lacks(cls, device: Device) -> str | None:
        if not is_transformer_engine_available():
            return "it is not installed"
        return "it needs a GPU" if device.name == "cpu" else device.lacks_fp8()

    def convert(self, bundle: Bundle) -> None:
        for entry in bundle.models:
            if entry.evaluation:
                continue
            inner = original_of(entry.value)
            if not has_transformer_engine_layers(inner):
                convert_model(inner)
            apply_fp8_autowrap(inner, self.recipe)
        super().convert(bundle)


def _engine(what: str) -> Any:
    if not is_transformer_engine_available():
        raise ImportError(f"`{what}` needs TransformerEngine, which is not installed.")
    import transformer_engine.pytorch as te

    return te


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Tell whether a model has a layer of TransformerEngine.

    Args:
        model: the model.
    """
    te = _engine("has_transformer_engine_layers")
    return any(isinstance(module, (te.LayerNorm, te.Linear, te.TransformerLayer)) for module in model.modules())


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace layers of torch by those of TransformerEngine, or the other way round. Parameters are kept.

    Linear layers whose sizes fp8 cannot multiply stay as they are.

    Args:
        model: the model, which is changed in place.
        to_transformer_engine: the direction.
        _convert_linear: convert linear layers.
        _convert_ln: convert layer norms.
    """
    te = _engine("convert_model")
    for name, child in list(model.named_children()):
        if to_transformer_engine:
            new = _to_engine(te, child, linear=_convert_linear, norm=_convert_ln)
        else:
            new = _to_torch(te, child, linear=_convert_linear, norm=_convert_ln)
        if new is None:
            convert_model(child, to_transformer_engine, _convert_linear, _convert_ln)
            continue
        new.weight = child.weight
        if _has_bias(child):
            new.bias = child.bias
        new.train(child.training)
        setattr(model, name, new)


def _has_bias(layer: Any) -> bool:
    """Where there is none, torch's layers have None, and the engine's an empty tensor."""
    return layer.bias is not None and layer.bias.numel() > 0


def _to_engine(te: Any, layer: nn.Module, *, linear: bool, norm: bool) -> Any:
    """The layer of the engine that computes what one of torch does; None where there is none."""
    if linear and type(layer) is nn.Linear and not (layer.in_features % PIECE or layer.out_features % PIECE):
        bias = _has_bias(layer)
        return te.Linear(layer.in_features, layer.out_features, bias=bias, params_dtype=layer.weight.dtype)
    # The engine's has both parameters, and goes over the last dimension.
    if norm and type(layer) is nn.LayerNorm and layer.bias is not None and len(layer.normalized_shape) == 1:
        return te.LayerNorm(layer.normalized_shape[0], eps=layer.eps, params_dtype=layer.weight.dtype)
    return None


def _to_torch(te: Any, layer: Any, *, linear: bool, norm: bool) -> nn.Module | None:
    """The layer of torch that computes what one of the engine does; None where there is none."""
    with torch.device("meta"):  # its parameters are replaced
        if linear and isinstance(layer, te.Linear):
            return nn.Linear(layer.in_features, layer.out_features, bias=_has_bias(layer))
        if norm and isinstance(layer, te.LayerNorm):
            return nn.LayerNorm(layer.weight.shape[0], eps=layer.eps)
    return None


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Make a forward that computes in fp8.

    Args:
        model_forward: the original forward, which takes the model as its first argument.
        fp8_recipe: the recipe of TransformerEngine.
        use_during_eval: compute in fp8 in evaluation as well.

    Returns:
        The new forward.
    """
    te = _engine("contextual_fp8_autocast")

    @functools.wraps(model_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(self, *args, **kwargs)

    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Make the forward of a model compute in fp8.

    Args:
        model: the model.
        fp8_recipe_handler: the settings, a `TERecipeKwargs`.

    Returns:
        The model.
    """
    te = _engine("apply_fp8_autowrap")
    handler = TERecipeKwargs() if fp8_recipe_handler is None else fp8_recipe_handler
    recipe = _recipe(te, handler)
    original: Any = model.forward
    function = getattr(original, "__func__", None)
    # A method, not a closure over the model: a deep copy of the model must call its own forward.
    wrapped = contextual_fp8_autocast(
        function or (lambda self, *args, **kwargs: original(*args, **kwargs)),
        recipe,
        bool(handler.use_autocast_during_eval),
    )
    inner: Any = model
    inner.forward = types.MethodType(wrapped, model)
    return model


def _recipe(te: Any, handler: Any) -> Any:
    from transformer_engine.common import recipe

    kind = recipe.MXFP8BlockScaling if handler.use_mxfp8_block_scaling else recipe.DelayedScaling
    settings = {
        "margin": handler.margin,
        "interval": handler.interval,
        "fp8_format": getattr(recipe.Format, handler.fp8_format),
        "amax_history_len": handler.amax_history_len,
        "amax_compute_algo": handler.amax_compute_algo,
        "override_linear_precision": handler.override_linear_precision,
    }
    # Which of these a recipe has depends on its kind, and on the release of the engine.
    taken = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in settings.items() if name in taken})
