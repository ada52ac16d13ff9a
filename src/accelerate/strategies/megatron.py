"""Megatron-LM: model, optimizer and scheduler become one engine, which splits layers and stages over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from accelerate.bundle import Bundle, Entry
from accelerate.checkpoint.parts import Part
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import Run, StagedLoad
from accelerate.comm import current
from accelerate.config.accumulation import GradientAccumulationPlugin
from accelerate.config.enums import DynamoBackend
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.config.megatron import MODEL_CONFIGS_TO_MEGATRON_PARSERS, MegatronLMPlugin
from accelerate.engines.megatron import building, checkpoint, parallel
from accelerate.engines.megatron.arguments import arguments, refuse_unknown
from accelerate.engines.megatron.data import DatasetLoader, enlarged
from accelerate.engines.megatron.engine import MegatronEngine
from accelerate.engines.megatron.families import family_of
from accelerate.engines.megatron_lm import (
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
)
from accelerate.errors import NotYetSupported, a_kind_of, warn
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Outputs, WholeStepStrategy


class Megatron(WholeStepStrategy):
    optimizer_wrapper = MegatronLMOptimizerWrapper

    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        assert state.megatron_lm_plugin is not None
        self.plugin: MegatronLMPlugin = state.megatron_lm_plugin
        if state.dynamo_plugin is not None and state.dynamo_plugin.backend != DynamoBackend.NO:
            raise NotYetSupported("torch.compile with Megatron-LM", "leave out `dynamo_backend`.")
        parallel.begin(self.plugin, state.num_processes)
        self.engine: MegatronEngine | None = None
        # The batch sizes of the script's loaders, which are those of micro-batches.
        self.batch_sizes: list[int] = []
        # Whether the loaders of indexed datasets were handed out.
        self._has_datasets = False
        self._warned = False

    def accumulation(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        if plugin.num_steps not in (None, 1):
            raise ValueError(
                f"gradient_accumulation_steps={plugin.num_steps} does not work with Megatron-LM, whose forward is a "
                f"whole step: set `num_micro_batches={plugin.num_steps}` in the MegatronLMPlugin."
            )
        return plugin

    # --- who gets which data ------------------------------------------------------------------------------------

    def data_shares(self) -> list[int]:
        return parallel.data_shares(self.plugin, self.state.num_processes)

    def outputs(self) -> Outputs:
        counts = parallel.speaks_for_its_copy()
        return Outputs(counts, counts)

    def loader(self, loader: Any, prepare: Callable[[Any], Any]) -> Any:
        assert self.plugin.num_micro_batches is not None
        if isinstance(loader, MegatronLMDummyDataLoader):
            return DatasetLoader(loader, prepare)
        size = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size
        if size is not None:
            self.batch_sizes.append(size)
        return prepare(enlarged(loader, self.plugin.num_micro_batches))

    # --- preparing ----------------------------------------------------------------------------------------------

    def prepare(self, bundle: Bundle) -> None:
        models = [model for model in bundle.models if not model.evaluation]
        if len(models) + (self.engine is not None) > 1:
            raise ValueError(
                "Megatron-LM trains one model in a process: prepare one, or create another `Accelerator()` after "
                "`accelerator.free_memory()`."
            )
        if (not models and (bundle.optimizers or bundle.schedulers)) or (bundle.schedulers and not bundle.optimizers):
            raise ValueError(
                "Megatron-LM makes one engine of a model, its optimizer and its scheduler: pass them to one call of "
                "`prepare`."
            )
        if len(bundle.optimizers) > 1 or len(bundle.schedulers) > 1:
            raise ValueError("Megatron-LM steps one optimizer with one scheduler: give it groups of parameters.")
        datasets = [entry.value for entry in bundle.loaders if isinstance(entry.value, DatasetLoader)]
        self._check_datasets(datasets)
        self._set_batch_sizes(datasets)
        if models:
            optimizer = bundle.optimizers[0] if bundle.optimizers else None
            scheduler = bundle.schedulers[0] if bundle.schedulers else None
            self._make_engine(models[0], optimizer, scheduler, datasets)
        if datasets:
            for dataset, loader in zip(datasets, datasets[0].build(self.accelerator()), strict=False):
                dataset.fill(loader)
            self._has_datasets = True

    def _check_datasets(self, datasets: list[DatasetLoader]) -> None:
        """They are made together, and told apart by their order."""
        if datasets and self._has_datasets:
            raise ValueError(
                "Loaders of Megatron-LM's datasets were prepared before: pass those for training, validation and test, "
                "in this order, in one call of `prepare`."
            )
        if len(datasets) > 3:
            raise ValueError(
                "A MegatronLMDummyDataLoader stands for loaders for training, validation and test, but "
                f"{len(datasets)} of them were passed to `prepare`: leave out the others."
            )
        if any(dataset.dummy.dataset_args != datasets[0].dummy.dataset_args for dataset in datasets[1:]):
            raise ValueError(
                "Loaders for training, validation and test are made from one `MegatronLMDummyDataLoader`, but "
                "those that were passed to `prepare` have different arguments: pass the same one for each."
            )

    def _set_batch_sizes(self, datasets: list[DatasetLoader]) -> None:
        sizes = self.batch_sizes or [size for each in datasets if (size := each.micro_batch_size) is not None]
        size = (min if self.plugin.is_train_batch_min else max)(sizes, default=1)
        copies = parallel.data_parallel_size(self.plugin, self.state.num_processes)
        self.plugin.set_training_args(size, copies)

    def _make_engine(
        self, model: Entry, optimizer: Entry | None, scheduler: Entry | None, datasets: list[DatasetLoader]
    ) -> None:
        plugin = self.plugin
        given = model.value
        config = getattr(given, "config", None)
        kind = str(getattr(config, "model_type", "")).lower()
        own = plugin.custom_model_provider_function
        if own is None or any(known in kind for known in MODEL_CONFIGS_TO_MEGATRON_PARSERS):
            if not kind:
                raise ValueError(
                    "Megatron-LM builds models of transformers (GPT-2, Llama, BERT, T5) itself, but "
                    f"{type(given).__name__} is none of them: give the MegatronLMPlugin a "
                    "`custom_model_provider_function`."
                )
            if own is None:
                family_of(config)  # which says what can be built, before the sizes of anything are looked for
            if optimizer is not None and own is None:
                building.check_trains_all(given, optimizer.value)
            plugin.set_network_size_args(given)
        if datasets:  # after the sizes of the model, which has a length of sequences as well
            datasets[0].dummy.set_megatron_data_args()
        if optimizer is not None:
            plugin.set_optimizer_type(optimizer.value)
        if scheduler is not None:
            if not isinstance(scheduler.value, MegatronLMDummyScheduler):
                raise ValueError(
                    f"Megatron-LM makes its own scheduler, and cannot step {a_kind_of(scheduler.value)}: pass a "
                    "`MegatronLMDummyScheduler`."
                )
            refuse_unknown(
                scheduler.value.kwargs, {"total_num_steps", "warmup_num_steps"}, MegatronLMDummyScheduler.__name__
            )
            plugin.set_scheduler_args(scheduler.value)
        plugin.model_config = None if own is not None else config
        args = arguments(plugin)
        with parallel.seeded(self._seed(args)):
            models = building.make_models(plugin, args, self.device, given)
        made = None if optimizer is None else building.make_optimizer(plugin, args, models, optimizer.value)
        schedule = None if scheduler is None or made is None else building.make_scheduler(args, made)
        engine = MegatronEngine(self.accelerator(), models, made, schedule)
        self.engine = model.value = engine
        if optimizer is not None:
            optimizer.value = made
        if scheduler is not None:
            scheduler.value = schedule

    def _seed(self, args: SimpleNamespace) -> int:
        """One for all processes: that of the first one, as a script has set it."""
        seed: list[Any] = [args.seed if args.seed is not None else torch.initial_seed() % 2**31]
        current().broadcast_objects(seed)
        return int(seed[0])

    def engine_scheduler(self, scheduler: Any, optimizers: list[Any]) -> MegatronLMSchedulerWrapper | None:
        if not isinstance(scheduler, OptimizerParamScheduler):
            return None
        return MegatronLMSchedulerWrapper(scheduler, optimizers)

    def unwrap(self, model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """This process's part of the model; a list where it has several."""
        if not isinstance(model, MegatronEngine):
            return super().unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)
        return model.chunks[0] if len(model.chunks) == 1 else model.chunks

    def free_memory(self) -> None:
        self.engine = None
        self.batch_sizes.clear()
        self._has_datasets = False

    # --- one step: the engine has taken it when its forward returns ----------------------------------------------

    def backward(self, loss: torch.Tensor, *, divide: bool = True, **kwargs: Any) -> None:
        """Nothing is left to do."""
        if not divide:
            raise NotYetSupported(
                "`backward(loss, num_items=...)` with Megatron-LM",
                "return the sum and the number of its items from the loss function of a train step.",
            )

    def gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return []

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        raise ValueError("Megatron-LM clips gradients only by their norm: set `gradient_clipping` of the plugin.")

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """The norm of the gradients of the last step, which was taken with those the plugin has clipped."""
        clipped = self.plugin.gradient_clipping
        if max_norm != clipped and not self._warned:
            self._warned = True
            warn(
                f"clip_grad_norm_ was called with max_norm={max_norm}, but Megatron-LM has clipped at {clipped} "
                "inside its step: set `gradient_clipping` of the MegatronLMPlugin."
            )
        norm = None if self.engine is None else self.engine.grad_norm
        return torch.tensor(0.0 if norm is None else float(norm), device=self.device)

    # --- weights and checkpoints --------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        if not isinstance(model, MegatronEngine):
            return super().state_dict(model, unwrap=unwrap)
        return checkpoint.whole_weights(model)

    def save(self, run: Run, weights: list[dict[str, Any]], *, safe: bool, main: bool, **kwargs: Any) -> Iterator[Part]:
        if self.engine is not None:
            yield from checkpoint.parts(self.engine, main=main)

    def load(self, run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        if self.engine is None or not any(model is self.engine for model in run.models_to_load):
            return StagedLoad(lambda: None)  # it is left to a hook
        return StagedLoad(checkpoint.read(self.engine, reader, torch_load))
