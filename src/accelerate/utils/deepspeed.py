"""DeepSpeed, under its public path."""

from accelerate.config.deepspeed import DummyOptim, DummyScheduler, HfDeepSpeedConfig, get_active_deepspeed_plugin
from accelerate.engines.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    map_pytorch_optim_to_deepspeed,
)

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
]
