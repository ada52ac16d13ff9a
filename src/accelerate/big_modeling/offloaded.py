"""The state dict of a model whose weights lie elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.offload import align_module_device, has_offloaded_params


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model with all of its weights, offloaded or not, on the CPU."""
    state: dict[str, Any] = dict(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):
        if has_offloaded_params(module):
            get_state_dict_from_offload(module, f"{name}.weight" if name else "weight", state)
    lost = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if lost:
        raise RuntimeError(
            f"{', '.join(lost)} of this {type(model).__name__} cannot be saved, since nothing says where their values "
            "are: load them before saving."
        )
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Puts the weights of an offloaded module in their places in a state dict, which is returned.

    module_name: the name of one of the module's weights in it.
    """
    start = module_name.rpartition(".")[0]
    device = torch.device(device_to_put_offload) if has_offloaded_params(module) else None
    with align_module_device(module, device):
        for name, value in module.state_dict().items():
            full = f"{start}.{name}" if start else name
            if full in state_dict:
                state_dict[full] = value
    return state_dict
