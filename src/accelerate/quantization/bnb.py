"""Models with weights in 8 or 4 bits, by `bitsandbytes`."""

from __future__ import annotations

import copy
import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelerate.available import is_4bit_bnb_available, is_8bit_bnb_available
from accelerate.big_modeling.dispatch import dispatch_model, find_device_map
from accelerate.big_modeling.loading import load_checkpoint_in_model
from accelerate.big_modeling.meta import init_empty_weights
from accelerate.big_modeling.ties import find_tied_parameters
from accelerate.config.quantization import BnbQuantizationConfig
from accelerate.devices.base import DeviceLike

logger: logging.Logger = logging.getLogger(__name__)

_OFFLOADED = ("cpu", "disk")


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Mapping[str, DeviceLike] | str | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load a model with quantized linear layers onto its devices.

    Args:
        model: the model, best built under `init_empty_weights`, so that the full weights are never in memory at once.
        bnb_quantization_config: how to quantize.
        weights_location: its checkpoint, as in `load_checkpoint_in_model`.
        device_map: as in `load_checkpoint_and_dispatch`. Without one, the model goes to one device. Modules that your
            own map puts on "cpu" or "disk" beside a GPU, or on "disk" beside the CPU, are not quantized to 4 bits.
        no_split_module_classes: as in `load_checkpoint_and_dispatch`.
        max_memory: as in `load_checkpoint_and_dispatch`.
        offload_folder: as in `load_checkpoint_and_dispatch`.
        offload_state_dict: as in `load_checkpoint_and_dispatch`.

    Returns:
        The quantized model.
    """
    config = copy.copy(bnb_quantization_config)  # it may be used for other models
    _require_bnb(config)
    if config.skip_modules is None:
        config.skip_modules = get_keys_to_not_convert(model)
    if config.load_in_4bit:
        config.skip_modules = [*config.skip_modules, *_brought_in(device_map)]
    config.keep_in_fp32_modules = config.keep_in_fp32_modules or []
    left_alone = [*config.skip_modules, *config.keep_in_fp32_modules]
    device = get_parameter_device(model)
    if device is None or device.type != "meta":
        logger.warning("This model has its weights already: build it under `init_empty_weights` to save their memory.")
        model = replace_with_bnb_layers(model, config, modules_to_not_convert=left_alone)
        _cast(model, config)
        model.to(_one_device())
        return _marked(model, config)
    if weights_location is None:
        raise RuntimeError("This model has no weights (meta device): give the weights_location of its checkpoint.")
    with init_empty_weights():
        model = replace_with_bnb_layers(model, config, modules_to_not_convert=left_alone)
    found = get_quantized_model_device_map(
        model, config, device_map, max_memory=max_memory, no_split_module_classes=no_split_module_classes
    )
    load_checkpoint_in_model(
        model,
        weights_location,
        found,
        dtype=config.torch_dtype,
        offload_folder=offload_folder,
        offload_state_dict=offload_state_dict,
        keep_in_fp32_modules=config.keep_in_fp32_modules,
        offload_8bit_bnb=config.load_in_8bit and any(device in _OFFLOADED for device in found.values()),
    )
    return dispatch_model(_marked(model, config), device_map=found, offload_dir=offload_folder)


def _brought_in(device_map: Mapping[str, DeviceLike] | str | None) -> list[str]:
    """The modules that a map has run on another device than it keeps them on; without a GPU the CPU runs all."""
    if not isinstance(device_map, Mapping) or len(set(device_map.values())) == 1:
        return []
    has_gpu = any(str(device) not in _OFFLOADED for device in device_map.values())
    return [name for name, device in device_map.items() if str(device) in (_OFFLOADED if has_gpu else ("disk",))]


def _require_bnb(config: BnbQuantizationConfig) -> None:
    available = is_4bit_bnb_available() if config.load_in_4bit else is_8bit_bnb_available()
    if not available:
        raise ImportError("Quantizing a model needs bitsandbytes: pip install 'bitsandbytes>=0.48'.")


def _marked(model: Any, config: BnbQuantizationConfig) -> nn.Module:
    # Read when the model is moved or trained.
    model.is_loaded_in_8bit = config.load_in_8bit
    model.is_loaded_in_4bit = config.load_in_4bit
    marked: nn.Module = model
    return marked


def _cast(model: nn.Module, config: BnbQuantizationConfig) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            kept = any(part in name for part in config.keep_in_fp32_modules or [])
            parameter.data = parameter.data.to(torch.float32 if kept else config.torch_dtype)


def _one_device() -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name)
        if module.is_available():
            return torch.device(name, module.current_device())
    return torch.device("cpu")


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: Mapping[str, DeviceLike] | str | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
) -> dict[str, Any]:
    """Plan the device map of a model that will be quantized, with its sizes after that.

    Args:
        model: the model.
        bnb_quantization_config: how it will be quantized.
        device_map: a map, or the name of a strategy such as "auto".
        max_memory: the limit of each device.
        no_split_module_classes: names of classes that are never split.

    Returns:
        The device map.
    """
    config = bnb_quantization_config
    if device_map is None:
        return {"": _one_device()}
    skipped, kept = config.skip_modules or [], config.keep_in_fp32_modules or []
    if isinstance(device_map, str):
        special = {name: config.torch_dtype for name, _ in model.named_parameters() if any(m in name for m in skipped)}
        special |= {name: torch.float32 for name, _ in model.named_parameters() if any(m in name for m in kept)}
        device_map = find_device_map(
            model, device_map, max_memory, no_split_module_classes, config.target_dtype, special
        )
    offloaded = [name or "the whole model" for name, device in device_map.items() if device in _OFFLOADED]
    quantized = [name for name in offloaded if name not in skipped and name not in kept]
    if quantized and len(offloaded) < len(device_map):
        if config.load_in_4bit:
            raise ValueError(
                f"{', '.join(quantized)} would be offloaded, which weights in 4 bits cannot be: make room on the GPU, "
                "or name these modules with 'cpu' or 'disk' in a device map of your own, which leaves them unquantized."
            )
        logger.info(f"{', '.join(quantized)} are quantized to 8 bits and offloaded.")
    return dict(device_map)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of modules that are better not quantized: the last one, and all with tied parameters.

    Args:
        model: the model.
    """
    tied = [name for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    without_head = prefix is not None and not hasattr(model, prefix)
    if without_head and not tied:
        return []
    last = [name for name, _ in list(model.named_children())[-1:]]
    names = [name.removesuffix(".weight").removesuffix(".bias") for name in [*tied, *last]]
    return list(dict.fromkeys(names))


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: list[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Replace linear layers by those of bitsandbytes. Weights are quantized when they are moved.

    Args:
        model: the model.
        bnb_quantization_config: how to quantize.
        modules_to_not_convert: names of modules that stay as they are, with all their submodules.
        current_key_name: the path of `model` in the model that these names belong to.

    Returns:
        The model.
    """
    left_alone = modules_to_not_convert or []
    path = ".".join(current_key_name or [])
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not _is_named(f"{path}.{name}" if path else name, left_alone)
    ]
    for name, module in found:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _quantized_layer(module, bnb_quantization_config))
    if not found:
        logger.warning(f"This {type(model).__name__} has no linear layer that could be quantized.")
    return model


def _is_named(name: str, modules: list[str]) -> bool:
    last = name.rpartition(".")[2]
    return any(module in (name, last) or f"{module}." in f"{name}." for module in modules)


def _quantized_layer(module: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    layers = importlib.import_module("bitsandbytes.nn")
    sizes = module.in_features, module.out_features, module.bias is not None
    if config.load_in_8bit:
        layer = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=config.llm_int8_threshold)
    else:
        layer = layers.Linear4bit(
            *sizes,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
    layer.weight.data = module.weight.data
    if module.bias is not None:
        layer.bias.data = module.bias.data
    made: nn.Module = layer.requires_grad_(False)
    return made


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Tell whether a model has a layer with 4-bit weights.

    Args:
        model: the model.
    """
    return any(type(module).__name__ == "Linear4bit" for module in model.modules())


def get_parameter_device(parameter: nn.Module) -> torch.device | None:
    """Return the device of the first parameter of a module, or None if it has none.

    Args:
        parameter: the module.
    """
    first = next(parameter.parameters(), None)
    return None if first is None else first.device
