"""The steps of FSDP version 2, one by one: for scripts that shard a model by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.parallel import values
from accelerate.precision.scaler import ShardedScaler
from accelerate.state import PartialState
from accelerate.strategies.sharded import rebind
from accelerate.strategies.wrapping import compute_twice, ignored_modules, matching, parts
from accelerate.torch_internals.compile import ADDED_TO_NAMES
from accelerate.torch_internals.modules import parameters_of


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Collect the parameters of modules, and move them to a device.

    Args:
        modules: a list, or a regular expression that matches whole names in the model; None for none.
        model: the model.
        device: the device.

    Returns:
        The parameters.
    """
    if modules is None:
        return set()
    found = matching(modules, model) if isinstance(modules, str) else list(modules)
    return {parameter for module in found for parameter in module.to(device).parameters()}


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Remove from names what `torch.compile` and activation checkpointing add to them.

    Args:
        named_params: anything by name.

    Returns:
        The same values by their original names.
    """
    clean = {}
    for name, value in named_params.items():
        for prefix in ADDED_TO_NAMES:
            name = name.replace(f"{prefix}.", "")
        clean[name] = value
    return clean


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Make a function that tells which modules of a model are sharded on their own.

    Args:
        fsdp2_plugin: the plugin.
        model: the model.

    Returns:
        The function, or None if no module is.
    """
    fsdp2_plugin.set_auto_wrap_policy(model)
    if fsdp2_plugin.auto_wrap_policy is None:  # what `prepare` does then is not a policy of the plugin
        return None
    chosen = parts(fsdp2_plugin, model, ignored_modules(fsdp2_plugin, model))
    return (lambda module: module in chosen) if chosen else None


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Apply activation checkpointing to the modules that the plugin's policy chooses.

    Args:
        accelerator: the Accelerator.
        model: the model.

    Returns:
        The model.
    """
    plugin = accelerator.state.fsdp_plugin
    for part in parts(plugin, model, ignored_modules(plugin, model)) or [model]:
        compute_twice(part, offload=bool(plugin.activation_checkpointing_offload))
    return model


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model in place, as the plugin says.

    Args:
        accelerator: the Accelerator.
        model: the model.

    Returns:
        The model.
    """
    prepared: nn.Module = accelerator._strategy.shard(model)
    return prepared


OWN_PREPARE_MODEL = fsdp2_prepare_model


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Load a full state dict into a sharded model. Only rank 0 needs the values.

    Args:
        accelerator: the Accelerator.
        model: the sharded model.
        full_sd: the full state dict.
        cpu_offload: keep the shards in host memory.
    """
    first = accelerator.is_main_process
    values.give(model, dict(full_sd) if first else {}, accelerator.device, torch.device("cpu") if cpu_offload else None)


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[int, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer, keeping its groups and state.

    Args:
        optimizer: the optimizer.
        mapping: from the `data_ptr()` of an old parameter to the new one.
    """
    new: dict[int, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.data_ptr() not in mapping:
                raise KeyError(
                    f"The mapping has no new parameter for one of shape {tuple(parameter.shape)} of this "
                    f"{type(optimizer).__name__}, which would no longer be trained: give one for each."
                )
            new[id(parameter)] = mapping[parameter.data_ptr()]
    rebind(optimizer, lambda parameter: new.get(id(parameter), parameter))


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Create a gradient scaler whose ranks agree on which steps are skipped.

    Args:
        kwargs: arguments of the scaler.
    """
    return ShardedScaler(**{"device": PartialState().device.type, **kwargs})


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], None], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], None]:
    """Make a function that materializes modules like `param_init_fn` and keeps shared parameters shared.

    Args:
        param_init_fn: materializes one module.
        model: the model.
        device: the device.

    Returns:
        The new function.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    shared = [places for places in owners.values() if len(places) > 1]
    first: dict[int, nn.Parameter] = {}

    def initialize(module: nn.Module) -> None:
        param_init_fn(module)
        for number, places in enumerate(shared):
            for owner, name in places:
                if owner is module:
                    table = parameters_of(module)
                    made: Any = table[name]
                    table[name] = first.setdefault(number, made)

    return initialize if shared else param_init_fn
