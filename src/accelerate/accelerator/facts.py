"""What an Accelerator tells of itself: the processes, the device, the mesh, and the settings in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accelerate.accumulation import Accumulation
from accelerate.config.data import DataLoaderConfiguration
from accelerate.config.enums import DistributedType, FP8BackendType
from accelerate.config.project import ProjectConfiguration
from accelerate.errors import NotYetSupported
from accelerate.precision import Precision
from accelerate.state import AcceleratorState, GradientState
from accelerate.state.processes import ProcessControl
from accelerate.strategies import Strategy

if TYPE_CHECKING:
    from accelerate.config.deepspeed import DeepSpeedPlugin
    from accelerate.parallelism_config import ParallelismConfig


class AcceleratorFacts(ProcessControl):
    """Properties that read what the Accelerator was set up with; the few that can be assigned are so in the release."""

    state: AcceleratorState
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    dataloader_config: DataLoaderConfiguration
    _strategy: Strategy
    _precision: Precision
    _accumulation: Accumulation

    # --- the state of the process -------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """What kind of set-up the processes form."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """How many processes there are."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """Which of all processes this one is."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """Which of the processes of its machine this one is."""
        return self.state.local_process_index

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each on its own device other than the CPU."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """How numbers are cast: "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The settings of DeepSpeed; None where it is not the engine."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The DeepSpeed engine that was created last, for scripts that call it directly; None where there is none."""
        return self._strategy.engine_wrapped()

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Make a loader that gives each rank its part of every sequence, for DeepSpeed's sequence parallelism.

        Args:
            dl: the prepared loader.
            model: the prepared model.

        Returns:
            The adapted loader.
        """
        return self._strategy.cut_sequences(dl)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8; NO where none does."""
        return self._precision.fp8_backend

    @property
    def fp8_enabled(self) -> bool:
        """Whether numbers are computed in fp8."""
        return self.fp8_backend != FP8BackendType.NO

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The axes of the device mesh; None where there is none."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh that a `ParallelismConfig` describes; None where there is none."""
        return self.state.device_mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the engine can be combined with other axes of a mesh."""
        return self.is_fsdp2

    @property
    def tensor_parallel_rank(self) -> int:
        """The rank of this process among those that share each layer."""
        return self._axis_rank("tp")

    @property
    def context_parallel_rank(self) -> int:
        """The rank of this process among those that share each sequence."""
        return self._axis_rank("cp")

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data this process gets."""
        return self._axis_rank("dp_replicate", "dp_shard")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The rank of this process among those that share one copy of the model."""
        return self._axis_rank("dp_shard")

    @property
    def pipeline_parallel_rank(self) -> int:
        """There is no pipeline axis for training."""
        raise NotYetSupported("A pipeline axis", "use dp_shard_size, tp_size or cp_size to spread a model.")

    def _axis_rank(self, *axes: str) -> int:
        if self.parallelism_config is None:
            raise RuntimeError("There is no device mesh: pass `parallelism_config=ParallelismConfig(...)`.")
        from accelerate.parallel.mesh import axis_rank

        return axis_rank(self.torch_device_mesh, *axes)

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP version 2 is the engine."""
        return self.state.is_fsdp2

    # --- settings, read where they are used ---------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> Any:
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """How many checkpoints have been saved under automatic naming."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this process takes part in saving the model."""
        return True

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many micro-batches make one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = steps

    @property
    def step(self) -> int:
        """How many micro-batches `accumulate` has seen since a loader last ended."""
        return self._accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._accumulation.step = step
        # The windows that are open go on from there.
        self._accumulation.counts = dict.fromkeys(self._accumulation.counts, step)

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronized at the current micro-batch, and the optimizer steps."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self.gradient_state._set_sync_gradients(sync)
