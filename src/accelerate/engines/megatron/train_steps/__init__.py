"""What Megatron-LM's schedules call for a micro-batch: get it, run the model, compute the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.engines.megatron.train_steps.base import AbstractTrainStep
from accelerate.engines.megatron.train_steps.bert import BertTrainStep
from accelerate.engines.megatron.train_steps.gpt import GPTTrainStep
from accelerate.engines.megatron.train_steps.t5 import T5TrainStep

TRAIN_STEPS: dict[str, Callable[[Any, Any], Any]] = {"gpt": GPTTrainStep, "bert": BertTrainStep, "t5": T5TrainStep}


def train_step_for(accelerator: Any, args: Any) -> Any:
    """The step of the kind of models that `args.model_type_name` says."""
    if args.model_type_name not in TRAIN_STEPS:
        raise ValueError(
            f"There is no train step for models of the kind {args.model_type_name!r}: write one and pass it as "
            "`MegatronLMPlugin(custom_train_step_class=...)`."
        )
    return TRAIN_STEPS[args.model_type_name](accelerator, args)


__all__ = ["TRAIN_STEPS", "AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "T5TrainStep", "train_step_for"]
