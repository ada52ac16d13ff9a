"""Megatron-LM as a script sees it. The engine itself is not part of this version; what needs it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerate.engines.wrappers import OptimizerOfEngine, SchedulerOfEngine
from accelerate.errors import NotYetSupported


def _not_yet(what: str) -> NotYetSupported:
    return NotYetSupported(f"Megatron-LM (`{what}`)", "train with FSDP, or with tensor parallelism.")


class MegatronLMDummyDataLoader:
    """Stands for loaders that Megatron-LM makes of its own indexed datasets. dataset_kwargs: its data arguments."""

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = {**dataset_kwargs, "megatron_dataset_flag": True}

    def set_megatron_data_args(self) -> None:
        """Tell Megatron-LM about the datasets."""
        raise _not_yet("set_megatron_data_args")

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable[..., Any]:
        """The function that makes the three datasets."""
        raise _not_yet("get_train_valid_test_datasets_provider")

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Any:
        """The three iterators."""
        raise _not_yet("build_train_valid_test_data_iterators")


class MegatronLMDummyScheduler:
    """Stands for the scheduler that Megatron-LM makes."""

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMOptimizerWrapper(OptimizerOfEngine):
    """The optimizer of Megatron-LM: it was stepped and cleared when the forward returns."""

    skipped_attribute = "skipped_iter"


class MegatronLMSchedulerWrapper(SchedulerOfEngine):
    """The scheduler of Megatron-LM: it was stepped when the forward returns."""


class AbstractTrainStep:
    """What Megatron-LM's schedule calls for a micro-batch: get it, run the model, compute the loss."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The function that takes a micro-batch from an iterator."""

    def get_forward_step_func(self) -> Any:
        """The function that runs the model."""

    def get_loss_func(self, accelerator: Any) -> Any:
        """The function that computes the loss of its outputs."""


class BertTrainStep(AbstractTrainStep):
    """The step of a BERT."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        raise _not_yet("BertTrainStep")

    def get_forward_step_func(self, pretraining_flag: bool, bert_binary_head: bool) -> Any:  # type: ignore[override]
        """The function that runs the model."""

    def get_loss_func(self, accelerator: Any, pretraining_flag: bool, num_labels: int) -> Any:  # type: ignore[override]
        """The function that computes the loss of its outputs."""


class GPTTrainStep(AbstractTrainStep):
    """The step of a GPT."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        raise _not_yet("GPTTrainStep")


class T5TrainStep(AbstractTrainStep):
    """The step of a T5. In its masks, True is what may not be looked at."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        raise _not_yet("T5TrainStep")

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """From which places of a padded sequence to which others."""
        return attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2) < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device | str) -> torch.Tensor:
        """From each place to those after it."""
        return torch.ones(1, seq_length, seq_length, device=device).tril() < 0.5

    @staticmethod
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device | str) -> torch.Tensor:
        """From each place of the decoder to the padding of the encoder."""
        here = torch.ones(attention_mask.shape[0], dec_seq_length, 1, device=device)
        return attention_mask.unsqueeze(1) * here < 0.5


class MegatronEngine(nn.Module):
    """Model, optimizer and scheduler of Megatron-LM in one: a forward is a whole step."""

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        raise _not_yet("MegatronEngine")

    def get_module_config(self) -> Any:
        """The config of the model."""

    def train(self) -> None:  # type: ignore[override]
        """Train in the forwards that follow."""

    def eval(self) -> None:  # type: ignore[override]
        """Evaluate in the forwards that follow."""

    def get_batch_data_iterator(self, batch_data: Any) -> Any:
        """The micro-batches of a batch."""

    def train_step(self, **batch_data: Any) -> Any:
        """A step of training."""

    def eval_step(self, **batch_data: Any) -> Any:
        """A step of evaluation."""

    def forward(self, **batch_data: Any) -> Any:
        """A step of one or the other."""

    def log_eval_results(self) -> None:
        """Log what evaluation has found."""

    def save_checkpoint(self, output_dir: Any) -> None:
        """Save in the format of Megatron-LM."""

    def load_checkpoint(self, input_dir: Any) -> None:
        """Load what `save_checkpoint` has saved."""


def initialize(accelerator: Any, extra_args_provider: Any = None, args_defaults: Any = None) -> None:
    """Set Megatron-LM up in this process."""
    raise _not_yet("initialize")


def finish_mpu_init() -> None:
    """Set up the groups of processes."""
    raise _not_yet("finish_mpu_init")


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> Any:
    """Build this process's part of the model."""
    raise _not_yet("model_provider_func")


def prepare_model_optimizer_scheduler(accelerator: Any) -> Any:
    """Make model, optimizer and scheduler."""
    raise _not_yet("prepare_model_optimizer_scheduler")


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """Make the loader."""
    raise _not_yet("prepare_data_loader")


def prepare_optimizer(accelerator: Any, model: Any) -> Any:
    """Make the optimizer."""
    raise _not_yet("prepare_optimizer")


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """Make the scheduler."""
    raise _not_yet("prepare_scheduler")


def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """The mean of losses over the processes with other data."""
    raise _not_yet("avg_losses_across_data_parallel_group")


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of the processes with other data, one after the other."""
    raise _not_yet("gather_across_data_parallel_groups")
