"""The engine of DeepSpeed, and the optimizer and the scheduler inside it, as a script sees them."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.engines.wrappers import OptimizerOfEngine, SchedulerOfEngine


class DeepSpeedEngineWrapper:
    """Backward and step of a DeepSpeed engine, which does both, and clips and clears gradients, by itself."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """The backward of a loss; the last one of a window also steps."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float:
        """The norm of the gradients of the last step, over all processes."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


class DeepSpeedOptimizerWrapper(OptimizerOfEngine):
    """The optimizer of an engine: it was stepped and cleared when `backward` returns."""

    skipped_attribute = "overflow"


class DeepSpeedSchedulerWrapper(SchedulerOfEngine):
    """The scheduler of an engine: it was stepped when `backward` returns."""


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer of DeepSpeed for parameters on the host that stands for one of torch: Adam, AdamW or Adagrad."""
    name = type(optimizer).__name__.lower()
    if "adam" not in name and "adagrad" not in name:
        raise ValueError(f"DeepSpeed has no {type(optimizer).__name__} on the host: use Adam, AdamW or Adagrad.")
    settings = {key: optimizer.defaults[key] for key in ("lr", "weight_decay", "eps")}
    if "adagrad" in name:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(optimizer.param_groups, **settings)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    settings |= {key: optimizer.defaults[key] for key in ("betas", "amsgrad")}
    decoupled = optimizer.defaults.get("decoupled_weight_decay", "adamw" in name)
    return DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=decoupled, **settings)
