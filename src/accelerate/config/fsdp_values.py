"""Single settings of FSDP: from what is written in a script or a variable to what torch takes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accelerate.config.environment import parse_flag_from_env
from accelerate.errors import UnknownName

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
        raise ValueError(f"fsdp_version is {asked!r}: it is 1 or 2.")
    return int(asked)


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
