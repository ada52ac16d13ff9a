"""Run a plain PyTorch training loop on one device or many, without rewriting it.

Names and submodules are imported when they are first used, so that `import accelerate` costs nothing.
"""

from __future__ import annotations

import os
import sys

from accelerate.doors import Package
from accelerate.lazy import lazy

__version__ = "2.0.0"

_NAMES = {
    "Accelerator": "accelerate.accelerator",
    "AutocastKwargs": "accelerate.config.handlers",
    "DDPCommunicationHookType": "accelerate.config.enums",
    "DataLoaderConfiguration": "accelerate.config.data",
    "DeepSpeedPlugin": "accelerate.config.deepspeed",
    "DistributedDataParallelKwargs": "accelerate.config.handlers",
    "DistributedType": "accelerate.config.enums",
    "FullyShardedDataParallelPlugin": "accelerate.config.fsdp",
    "GradScalerKwargs": "accelerate.config.handlers",
    "InitProcessGroupKwargs": "accelerate.config.handlers",
    "ParallelismConfig": "accelerate.parallelism_config",
    "PartialState": "accelerate.state",
    "ProfileKwargs": "accelerate.config.handlers",
    "cpu_offload": "accelerate.big_modeling.offload",
    "cpu_offload_with_hook": "accelerate.big_modeling.offload",
    "debug_launcher": "accelerate.launchers",
    "disk_offload": "accelerate.big_modeling.offload",
    "dispatch_model": "accelerate.big_modeling.dispatch",
    "find_executable_batch_size": "accelerate.memory",
    "infer_auto_device_map": "accelerate.big_modeling.device_map",
    "init_empty_weights": "accelerate.big_modeling.meta",
    "init_on_device": "accelerate.big_modeling.meta",
    "is_rich_available": "accelerate.available",
    "load_checkpoint_and_dispatch": "accelerate.big_modeling.dispatch",
    "load_checkpoint_in_model": "accelerate.big_modeling.loading",
    "notebook_launcher": "accelerate.launchers",
    "prepare_pippy": "accelerate.inference",
    "skip_first_batches": "accelerate.data_loader",
    "synchronize_rng_states": "accelerate.random",
}

__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy(__name__, _NAMES)
sys.modules[__name__].__class__ = Package


def _install_rich_tracebacks() -> None:
    """Let rich draw the tracebacks of uncaught errors, where it was asked for."""
    from accelerate.available import is_rich_available

    if is_rich_available():
        from rich.traceback import install

        install()


if "ACCELERATE_ENABLE_RICH" in os.environ:
    _install_rich_tracebacks()
