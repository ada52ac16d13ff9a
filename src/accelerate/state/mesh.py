"""The device mesh of this process: which axes were asked for, and the mesh that is as large as the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.config.parallel import TorchTensorParallelPlugin
from accelerate.errors import a_kind_of
from accelerate.parallelism_config import ParallelismConfig

if TYPE_CHECKING:
    from accelerate.state.engines import EngineSetup
    from accelerate.state.partial import PartialState


def mesh_config(
    config: ParallelismConfig | None, tensor_parallel: TorchTensorParallelPlugin | None, *, launched: bool
) -> ParallelismConfig | None:
    """The axes that were asked for. launched: whether the launch asks for a mesh, too."""
    if config is not None and not isinstance(config, ParallelismConfig):
        raise TypeError(f"parallelism_config is {a_kind_of(config)}: pass a ParallelismConfig.")
    if tensor_parallel is not None and not isinstance(tensor_parallel, TorchTensorParallelPlugin):
        raise TypeError(f"torch_tp_plugin is {a_kind_of(tensor_parallel)}: pass a TorchTensorParallelPlugin.")
    if config is None and launched:
        config = ParallelismConfig()
    if tensor_parallel is not None:
        if config is not None:
            raise ValueError(
                "Pass either `torch_tp_plugin` or `parallelism_config`, not both: ParallelismConfig has tp_size."
            )
        config = ParallelismConfig(tp_size=tensor_parallel.tp_size)
        config.device_mesh = tensor_parallel.torch_device_mesh
    return config


def make_mesh(config: ParallelismConfig, engine: EngineSetup, state: PartialState) -> Any:
    """The device mesh, as large as the run."""
    if config.total_size == 1:
        # Only that there is a mesh was asked for: the axis is that of the engine.
        setattr(config, f"{engine.axis}_size", state.num_processes)
    if config.sp_enabled:
        if not engine.cuts_sequences:
            raise ValueError(
                f"sp_size={config.sp_size} splits sequences with DeepSpeed, which is not in use: pass a "
                "`deepspeed_plugin`, or use cp_size."
            )
        # DeepSpeed spreads the model over all processes by itself: those that are left are copies to the mesh.
        config.dp_replicate_size = config.dp_replicate_size or 1
        if state.num_processes % config.total_size == 0:
            config.dp_replicate_size *= state.num_processes // config.total_size
    if config.total_size != state.num_processes:
        sizes = " x ".join(f"{axis}_size={config._sizes[axis]}" for axis in config.active_mesh_dims)
        raise ValueError(
            f"The ParallelismConfig is for {config.total_size} processes ({sizes}), but there are "
            f"{state.num_processes}: make the product of its sizes the number of processes."
        )
    return config.get_device_mesh(state.device.type)
