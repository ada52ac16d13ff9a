"""Sequences in parts, one for each process along an axis of the mesh: DeepSpeed's Ulysses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accelerate.errors import NotYetSupported
from accelerate.parallelism_config import ParallelismConfig


@dataclass
class Sharing:
    """How processes share sequences: DeepSpeed's groups of them, and the attention that a process has by itself."""

    groups: Any
    name: str
    attention: Any

    def end(self) -> None:
        """DeepSpeed makes its groups once, and replaces the attention of all models of a process."""
        if self.attention is not None:
            ALL_ATTENTION_FUNCTIONS[self.name] = self.attention
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None


def attend_together(model: nn.Module, parallelism: ParallelismConfig, batch_size: int) -> Sharing:
    """Have the attention of a model of transformers exchange heads for sequences."""
    config: Any = getattr(model, "config", None)
    own = getattr(config, "_attn_implementation", None)
    if own is None:
        raise ValueError(
            f"sp_size={parallelism.sp_size} needs a model of transformers, whose attention DeepSpeed can replace, "
            f"but {type(model).__name__} has no `config` that names one: use such a model, or leave sp_size at 1."
        )
    handler = parallelism.sp_handler
    assert handler is not None
    asked = handler.sp_attn_implementation or own
    if asked != own or own == "eager":
        raise ValueError(
            f"This {type(model).__name__} has the attention {own!r}, but sequences are split for {asked!r}: load "
            "the model with attn_implementation='sdpa', or a flash attention, and give sp_attn_implementation the "
            "same."
        )
    # Its own functions for processes, which an engine would make later.
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    alone = ALL_ATTENTION_FUNCTIONS.get(own)
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=own,
        sequence_parallel_size=parallelism.sp_size,
        micro_batch_size=batch_size,
        seq_length=handler.sp_seq_length,
        seq_length_is_variable=handler.sp_seq_length_is_variable,
    )
    return Sharing(groups, own, alone)


class SequenceLoader(UlyssesSPDataLoaderAdapter):
    """Batches of a prepared loader, of which each process gets a part of every sequence.

    The processes that share sequences read different batches, and work on one of them after the other.
    """

    def __init__(self, loader: Any, device: Any) -> None:
        group = parallel_state_sp.get_sequence_parallel_group()
        rank, size = (
            parallel_state_sp.get_sequence_parallel_rank(),
            parallel_state_sp.get_sequence_parallel_world_size(),
        )
        super().__init__(loader, sp_rank=rank, sp_group=group, sp_world_size=size, device=device)

    def __getattr__(self, name: str) -> Any:
        if "dl" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.__dict__["dl"], name)

    def without_first(self, num_batches: int) -> Any:
        if num_batches:
            raise NotYetSupported(
                "`skip_first_batches` of a loader whose sequences are in parts (sp_size)",
                "leave the first batches out in the loop, with `continue`.",
            )
        return self

    def __iter__(self) -> Iterator[Any]:
        self.iter = iter(self.dl)
        while True:
            self.micro_batches.clear()  # of an iteration that was broken off
            try:
                self.refill()
            except StopIteration:
                return
            last = getattr(self.dl, "end_of_dataloader", False)
            while self.micro_batches:
                batch = self.micro_batches.popleft()
                if last:
                    self.dl.end_of_dataloader = self.dl.ends_everywhere = not self.micro_batches
                yield batch
