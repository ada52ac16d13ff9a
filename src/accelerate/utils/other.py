"""Helpers for files, modules and the machine, under their public path."""

from accelerate.barrier import wait_for_everyone
from accelerate.compilation import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
)
from accelerate.constants import FSDP_PYTORCH_VERSION
from accelerate.files import TORCH_SAFE_GLOBALS, clean_state_dict_for_safetensors, load, save
from accelerate.machine import check_os_kernel, get_free_port, is_port_in_use
from accelerate.modules import get_model_tp_size, get_module_children_bottom_up, model_has_dtensor
from accelerate.text import convert_bytes, get_pretty_name, merge_dicts, recursive_getattr
from accelerate.unwrap import extract_model_from_parallel

__all__ = [
    "FSDP_PYTORCH_VERSION",
    "TORCH_SAFE_GLOBALS",
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_port_in_use",
    "is_repeated_blocks",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
]
