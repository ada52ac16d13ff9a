"""Weights of 8-bit layers on disk."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from accelerate.available import is_cuda_available
from accelerate.offload.module_tensors import find_tensor, set_module_tensor_to_device
from accelerate.offload.offloaded_weights import offload_weight
from accelerate.torch_internals.modules import parameters_of


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: str | os.PathLike[str],
    offload_index: dict[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Write a weight of an 8-bit layer and its scales to an offload folder, and leave the weight in the model empty.

    Args:
        model: the model.
        param: the weight.
        param_name: its name in the model.
        new_dtype: the dtype to quantize from.
        offload_folder: the folder.
        offload_index: the index of the folder, which gets the new entries.
        fp16_statistics: the scales of a weight that is already quantized. Without them, it is quantized here.
    """
    holder, name = find_tensor(model, param_name)
    scales = fp16_statistics
    if scales is None:
        # On the GPU if there is one: it is much faster there.
        device = torch.device("cuda", 0) if is_cuda_available() else torch.device("cpu")
        set_module_tensor_to_device(model, param_name, device, value=param, dtype=new_dtype, clear_cache=False)
        quantized: Any = parameters_of(holder)[name]
        param, scales = quantized.data, getattr(quantized, "SCB", None)
    offload_weight(param, param_name, offload_folder, offload_index)
    if scales is not None:
        offload_weight(scales, f"{param_name.rpartition('.')[0]}.SCB", offload_folder, offload_index)
    set_module_tensor_to_device(model, param_name, "meta", clear_cache=False)
