"""Megatron-LM as a script sees it: stand-ins for what it makes itself, and the functions that make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate.engines.megatron.data import DatasetLoader, enlarged
from accelerate.engines.megatron.engine import MegatronEngine
from accelerate.engines.megatron.train_steps import AbstractTrainStep, BertTrainStep, GPTTrainStep, T5TrainStep
from accelerate.engines.wrappers import OptimizerOfEngine, SchedulerOfEngine
from accelerate.errors import NotYetSupported
from accelerate.state import AcceleratorState

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "finish_mpu_init",
    "gather_across_data_parallel_groups",
    "initialize",
    "model_provider_func",
    "prepare_data_loader",
    "prepare_model_optimizer_scheduler",
    "prepare_optimizer",
    "prepare_scheduler",
]


class MegatronLMDummyDataLoader:
    """Stands for loaders that Megatron-LM makes of its own indexed datasets. dataset_kwargs: its data arguments.

    Pass it to `prepare` once for each of training, validation and test, in this order.
    """

    _accelerate_kind = "loaders"

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = {**dataset_kwargs, "megatron_dataset_flag": True}

    def set_megatron_data_args(self) -> None:
        """Put the data arguments beside the others of the plugin."""
        from accelerate.engines.megatron.arguments import check_names

        given = dict(self.dataset_args)
        if "splits_string" in given:  # as examples of the release call it, which reads `split`
            given.setdefault("split", given.pop("splits_string"))
        plugin = _plugin()
        check_names(plugin, given, type(self).__name__)
        plugin.megatron_lm_default_args.update(given)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable[..., Any]:
        """The function that makes the three datasets, from how many samples each of them is asked for."""
        own: Callable[..., Any] | None
        own = accelerator.state.megatron_lm_plugin.custom_megatron_datasets_provider_function
        if own is not None:
            return own
        from accelerate.engines.megatron.datasets import provider

        return provider(accelerator.state.megatron_lm_plugin)

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Loaders of the three datasets, each with batches for a whole step of one copy of the model."""
        from accelerate.engines.megatron.datasets import loaders

        return loaders(accelerator.state.megatron_lm_plugin, self.get_train_valid_test_datasets_provider(accelerator))


class MegatronLMDummyScheduler:
    """Stands for the scheduler that Megatron-LM makes.

    Args:
        optimizer: the optimizer that is prepared with it.
        total_num_steps: how many steps all processes with other data take together.
        warmup_num_steps: in how many of them the learning rate grows.
        **kwargs: refused in `prepare`: all else about the schedule is said by the plugin.
    """

    _accelerate_kind = "schedulers"

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

    def get_last_lr(self) -> list[float]:
        """The learning rates of the optimizer's groups."""
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]


def _plugin() -> Any:
    plugin = AcceleratorState().megatron_lm_plugin
    if plugin is None:
        raise ValueError(
            "Megatron-LM is not the engine of this process: pass a `megatron_lm_plugin` to `Accelerator()`, or launch "
            "with `--use_megatron_lm`."
        )
    return plugin


def initialize(
    accelerator: Any,
    extra_args_provider: Any = None,
    args_defaults: dict[str, Any] | None = None,
) -> None:
    """Set Megatron-LM up in this process. `Accelerator()` has done so; here arguments can be added.

    args_defaults: arguments, beside those of the plugin. extra_args_provider: is not called, since arguments are not
    read from the command line.
    """
    if extra_args_provider is not None:
        raise NotYetSupported("`extra_args_provider`", "put arguments into `other_megatron_args` of the plugin.")
    accelerator.state.megatron_lm_plugin.megatron_lm_default_args.update(args_defaults or {})
    finish_mpu_init()


def finish_mpu_init() -> None:
    """Make the groups of processes, unless they are there."""
    from accelerate.engines.megatron import parallel

    parallel.begin(_plugin(), AcceleratorState().num_processes)


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> Any:
    """This process's part of the model that was prepared, with new weights."""
    from accelerate.engines.megatron.models import build_model

    plugin = _plugin()
    if plugin.model_config is None:
        raise ValueError("No model of transformers was prepared, so there is nothing to build: call `prepare` first.")
    return build_model(plugin, plugin.model_config, pre_process=pre_process, post_process=post_process)


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[list[torch.nn.Module], Any, Any]:
    """Make model, optimizer and scheduler from the arguments of the plugin, with new weights."""
    from accelerate.engines.megatron import building
    from accelerate.engines.megatron.arguments import arguments

    plugin = accelerator.state.megatron_lm_plugin
    args = arguments(plugin)
    models = building.make_models(plugin, args, accelerator.device, None)
    optimizer = prepare_optimizer(accelerator, models)
    return models, optimizer, prepare_scheduler(accelerator, optimizer, None)


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """The loader of this process, with batches for whole steps; three of them for a `MegatronLMDummyDataLoader`."""
    if not isinstance(dataloader, MegatronLMDummyDataLoader):
        larger = enlarged(dataloader, accelerator.state.megatron_lm_plugin.num_micro_batches)
        return accelerator.prepare_data_loader(larger)
    made = [DatasetLoader(dataloader, accelerator.prepare_data_loader) for _ in range(3)]
    for each, loader in zip(made, made[0].build(accelerator), strict=True):
        each.fill(loader)
    return tuple(made)


def prepare_optimizer(accelerator: Any, model: list[torch.nn.Module]) -> Any:
    """Make the optimizer that the arguments of the plugin describe."""
    from accelerate.engines.megatron import building
    from accelerate.engines.megatron.arguments import arguments

    plugin = accelerator.state.megatron_lm_plugin
    return building.make_optimizer(plugin, arguments(plugin), model, None)


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """Make the scheduler that the arguments of the plugin describe. scheduler: is not used."""
    from accelerate.engines.megatron import building
    from accelerate.engines.megatron.arguments import arguments

    return building.make_scheduler(arguments(accelerator.state.megatron_lm_plugin), optimizer)


def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """The mean of losses over the processes with other data."""
    from accelerate.engines.megatron import parallel

    return parallel.avg_losses_across_data_parallel_group(losses)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of the processes with other data, one after the other."""
    from accelerate.engines.megatron import parallel

    return parallel.gather_across_data_parallel_groups(tensor)
