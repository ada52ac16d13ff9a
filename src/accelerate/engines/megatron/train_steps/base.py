"""The base of train steps, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# What a script may use instead of ours is called like these.
GetBatch = Callable[[Any], Any]
ForwardStep = Callable[[Any, torch.nn.Module], tuple[Any, Callable[[Any], Any]]]
# A sum over tokens, how many they are, and what is reported: with `calculate_per_token_loss` the mean is over all
# tokens of a step, without it over those of each micro-batch.
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class AbstractTrainStep:
    """The base of train steps, also of those of scripts (`MegatronLMPlugin(custom_train_step_class=...)`)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The function that takes a micro-batch from an iterator."""

    def get_forward_step_func(self) -> Any:
        """The function that runs the model."""

    def get_loss_func(self, accelerator: Any) -> Any:
        """The function that computes the loss of its outputs."""


def plugin_of(accelerator: Any) -> Any:
    """The `MegatronLMPlugin`."""
    return accelerator.state.megatron_lm_plugin


def output_class(name: str, args: Any) -> Any:
    """What the engine returns: a class of transformers, where the model's config asks for one."""
    if not args.model_return_dict:
        return None
    from transformers import modeling_outputs

    return getattr(modeling_outputs, name)


def broadcast(data_iterator: Any, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """A batch of Megatron-LM's own datasets, which only the first tensor-parallel rank reads."""
    from megatron.core.tensor_parallel import broadcast_data

    batch = None if data_iterator is None else taken(data_iterator, *keys)
    found: dict[str, torch.Tensor] = broadcast_data(list(keys), batch, torch.int64)
    return found


def taken(data_iterator: Any, *keys: str) -> dict[str, torch.Tensor]:
    """The next micro-batch, which has these keys."""
    batch: dict[str, torch.Tensor] = next(data_iterator)
    missing = [key for key in keys if key not in batch]
    if missing:
        raise ValueError(
            f"The train step needs {', '.join(f'`{key}`' for key in missing)} of a batch, which has "
            f"{', '.join(batch)}: give it by that name, or give the MegatronLMPlugin a `custom_get_batch_function` "
            "(`megatron_dataset_flag` is for batches of Megatron-LM's own datasets)."
        )
    return batch


def per_token(losses: torch.Tensor, loss_mask: torch.Tensor) -> Loss:
    """The loss of those tokens whose mask is 1."""
    total = (losses.float() * loss_mask).sum()
    count = loss_mask.sum().to(torch.int)
    return total, count, {"lm loss": reported_mean(total / count.clamp_min(1))}


def reported_mean(loss: torch.Tensor) -> torch.Tensor:
    """The mean over all copies of the model."""
    from accelerate.engines.megatron.parallel import avg_losses_across_data_parallel_group

    return avg_losses_across_data_parallel_group([loss])[0]
