"""What an engine of Megatron-LM writes to `tensorboard_dir`, under the names that Megatron-LM gives it."""

from __future__ import annotations

import math
from typing import Any


class Board:
    """Scalars of steps and evaluations. Only the main process has one."""

    def __init__(self, args: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(
                "`tensorboard_dir` of the MegatronLMPlugin needs TensorBoard: pip install tensorboard, or leave it out."
            ) from None
        self.args = args
        self.writer = SummaryWriter(args.tensorboard_dir)

    def step(self, engine: Any, losses: dict[str, Any], zeros: int | None) -> None:
        """A step of training."""
        values = {name: float(value) for name, value in losses.items() if value.ndim == 0}
        values["learning-rate"] = engine.optimizer.param_groups[0]["lr"]
        if engine.grad_norm is not None:
            values["grad-norm"] = float(engine.grad_norm)
        if zeros is not None:
            values["num-zeros"] = float(zeros)
        if self.args.log_loss_scale_to_tensorboard:
            values["loss-scale"] = float(engine.optimizer.get_loss_scale())
        if self.args.log_batch_size_to_tensorboard:
            values["batch-size"] = float(self.args.global_batch_size)
        self._write(values, engine.iteration)

    def evaluation(self, means: dict[str, float], iteration: int) -> None:
        """What an evaluation has found."""
        values = {f"{name} validation": mean for name, mean in means.items()}
        if self.args.pretraining_flag:
            values |= {f"{name} validation ppl": math.exp(min(20.0, mean)) for name, mean in means.items()}
        self._write(values, iteration)

    def _write(self, values: dict[str, float], iteration: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, iteration)
        self.writer.flush()
