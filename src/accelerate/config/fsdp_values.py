"""Single settings of FSDP: from what is written in a script or a variable to what torch takes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from accelerate.config.environment import parse_flag_from_env
from accelerate.errors import UnknownName
from accelerate.text import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

PREFIX = "FSDP_"

# What each short name of a precision computes in; weights of fp8 models are kept and exchanged in bf16.
DTYPES = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def give_memory(module: nn.Module) -> None:
    """Memory, on the device of this process, for parameters whose values come from the first one."""
    import torch

    device = torch.device("cpu")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        device = torch.device(kind.type, torch.accelerator.current_device_index())
    module.to_empty(device=device, recurse=False)


def version_of(asked: Any) -> int:
    asked = os.environ.get(PREFIX + "VERSION", "1") if asked is None else asked
    if str(asked) not in ("1", "2"):
        raise ValueError(f"fsdp_version is {asked!r}: choose 1 or 2.")
    return int(asked)


# Settings of torch_xla's older FSDP: what became of them where XLA spreads the whole program by itself.
_XLA_SETTINGS = {
    "shard_param_on_dim_0": "",
    "compute_dtype": "pass `mixed_precision` to the Accelerator",
    "buffer_dtype": "pass `mixed_precision` to the Accelerator",
    "fp32_reduce_scatter": "pass `mixed_precision` to the Accelerator",
    "auto_wrap_policy": "pass `auto_wrap_policy` to the plugin",
    **dict.fromkeys(
        (
            "reshard_after_forward",
            "flatten_parameters",
            "execute_sharding_on_init",
            "optimization_barrier_in_forward",
            "optimization_barrier_in_backward",
            "mark_step_on_finalization",
            "disable_reshard_on_root",
            "pin_layout_in_collective_ops",
            "use_all_gather_via_all_reduce",
        ),
        "XLA decides that by itself",
    ),
}


def xla_settings(asked: Any) -> dict[str, Any] | None:
    """The settings for XLA devices: as given, or a JSON object, in the variable if nowhere else."""
    asked = os.environ.get(PREFIX + "XLA_FSDP_SETTINGS") if asked is None else asked
    if asked is None:
        return None
    try:
        settings = json.loads(asked) if isinstance(asked, str) else dict(asked)
    except (TypeError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"xla_fsdp_settings is {asked!r}: give a dict, or a JSON object.")
    for name, value in settings.items():
        if name not in _XLA_SETTINGS:
            raise ValueError(
                f"xla_fsdp_settings has {name!r}, which is not a setting of FSDP on XLA "
                f"devices{did_you_mean(name, _XLA_SETTINGS)}: leave it out."
            )
        if _XLA_SETTINGS[name]:
            raise ValueError(f"xla_fsdp_settings has {name!r}, which is not set there: {_XLA_SETTINGS[name]}.")
        if not isinstance(value, bool):
            raise ValueError(f"{name} in xla_fsdp_settings is {value!r}: set it to true or false.")
    return settings


def member(kind: Any, asked: Any, argument: str) -> Any:
    """A member of an enum by itself, its name, or its number."""
    if isinstance(asked, kind):
        return asked
    name = str(asked).upper()
    for member in kind:
        if name in (member.name, member.name.removeprefix("_"), str(member.value)):
            return member
    known = ", ".join(member.name.removeprefix("_") for member in kind)
    raise UnknownName(f"{argument} is {asked!r}: choose one of {known}.")


def dtype_of(asked: Any) -> torch.dtype | None:
    import torch

    if asked is None:
        return None
    name = str(asked).removeprefix("torch.")
    dtype: Any = getattr(torch, DTYPES.get(name, name), None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"The mixed precision is {asked!r}: choose one of {', '.join(DTYPES)}.")
    return dtype


def precision_policy(version: int, asked: Any, buffer_autocast: bool) -> Any:
    """The policy object of a version, from a name or a dict of dtypes. buffer_autocast: leave buffers in fp32."""
    import torch
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    kind: Any = MixedPrecision if version == 1 else MixedPrecisionPolicy
    last = "buffer_dtype" if version == 1 else "output_dtype"
    if isinstance(asked, dict):
        unknown = sorted(asked.keys() - {"param_dtype", "reduce_dtype", last})
        if unknown:
            raise ValueError(
                f"mixed_precision_policy has {', '.join(unknown)}: FSDP version {version} knows "
                f"param_dtype, reduce_dtype and {last}."
            )
        dtypes = {name: dtype_of(value) for name, value in asked.items()}
    else:
        dtype = dtype_of(asked)
        dtypes = {"param_dtype": dtype, "reduce_dtype": dtype, last: dtype}
    if version == 1 and buffer_autocast:
        dtypes["buffer_dtype"] = torch.float32
    return kind(**dtypes)
