"""Settings of the single axes of a device mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.config.environment import parse_flag_from_env, read_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PREFIX = "PARALLELISM_CONFIG_"


@dataclass
class TorchTensorParallelPlugin:
    """Train with tensor parallelism only. `ParallelismConfig(tp_size=...)` does the same and can add other axes.

    Args:
        tp_size: over how many processes each layer is split.
        torch_device_mesh: the mesh whose axis `tp` the model is split over.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None


@dataclass
class TorchTensorParallelConfig:
    """Settings of the tensor-parallel axis.

    Args:
        enable_async_tp: not available; accepted and ignored.
        plan: how each part of a model is split, by name: 'colwise', 'rowwise', 'sequence', an object.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn("`enable_async_tp` is not available and does nothing: leave it out.", stacklevel=3)


@dataclass
class TorchContextParallelConfig:
    """Settings of the context-parallel axis: sequences are cut into pieces, and attention sees all of them.

    Args:
        cp_comm_strategy: how keys and values travel: 'allgather' (default) or 'alltoall'.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = os.environ.get(PREFIX + "CP_COMM_STRATEGY", "allgather")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(f"cp_comm_strategy is {self.cp_comm_strategy!r}: choose 'allgather' or 'alltoall'.")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of DeepSpeed's sequence-parallel axis (ALST / Ulysses).

    Args:
        sp_seq_length: the length of all sequences, if it is one.
        sp_seq_length_is_variable: whether batches come in different lengths (default: yes).
        sp_attn_implementation: the attention of the model: 'flash_attention_2', '..._3', or 'sdpa'.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length is None and PREFIX + "SP_SEQ_LENGTH" in os.environ:
            self.sp_seq_length = read_number(PREFIX + "SP_SEQ_LENGTH", 0)
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = parse_flag_from_env(PREFIX + "SP_SEQ_LENGTH_IS_VARIABLE", True)
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = os.environ.get(PREFIX + "SP_ATTN_IMPLEMENTATION")
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ValueError("sp_seq_length_is_variable=False needs the length of the sequences: pass sp_seq_length.")
        if self.sp_attn_implementation is not None and not _can_be_cut(self.sp_attn_implementation):
            raise ValueError(
                f"sp_attn_implementation is {self.sp_attn_implementation!r}, which cannot be split along the "
                "sequence: choose 'flash_attention_2', 'flash_attention_3', 'sdpa', or a flash-attn kernel of the "
                "Hub by its repository."
            )


def _can_be_cut(attention: str) -> bool:
    of_the_hub = "/" in attention and "flash-attn" in attention
    return of_the_hub or attention in ("flash_attention_2", "flash_attention_3", "sdpa")
