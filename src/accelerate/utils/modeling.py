"""Sizes, device maps and weights of models, under their public path."""

from accelerate.big_modeling.check import check_device_map, clean_device_map
from accelerate.big_modeling.device_map import fallback_allocate, get_module_size_with_ties, infer_auto_device_map
from accelerate.big_modeling.loading import load_checkpoint_in_model, load_state_dict
from accelerate.big_modeling.memory import get_balanced_memory, get_max_memory
from accelerate.big_modeling.offload import align_module_device, has_offloaded_params, load_offloaded_weights
from accelerate.big_modeling.offloaded import get_state_dict_from_offload, get_state_dict_offloaded_model
from accelerate.big_modeling.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
    get_module_leaves,
    id_tensor_storage,
)
from accelerate.big_modeling.tensors import (
    check_device_same,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)
from accelerate.big_modeling.tensors import resolve_dtype as _get_proper_dtype
from accelerate.big_modeling.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from accelerate.constants import SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from accelerate.modules import is_peft_model
from accelerate.precision import get_grad_scaler, get_mixed_precision_context_manager
from accelerate.text import convert_file_size_to_int

__all__ = [
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "_get_proper_dtype",
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]
