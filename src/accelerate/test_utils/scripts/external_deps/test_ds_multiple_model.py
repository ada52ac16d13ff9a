"""Checks two models under DeepSpeed in one script, each with settings of its own.

`accelerate launch test_ds_multiple_model.py`; it needs the deepspeed library, and GPUs.
"""

from __future__ import annotations

from typing import Any

import torch

import accelerate
from accelerate.accelerator import Accelerator
from accelerate.state import AcceleratorState
from accelerate.test_utils import pair_training
from accelerate.test_utils.checks import expect, needs_deepspeed, run_checks
from accelerate.test_utils.sentence_pairs import get_dataloaders as get_dataloaders

EVAL_BATCH_SIZE = 16
_SHARED: dict[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 8,
}
# Settings, where others have the paths of files with such settings: DeepSpeed takes both.
ds_config_file = {f"zero{stage}": {**_SHARED, "zero_optimization": {"stage": stage}} for stage in (2, 3)}


class NoiseModel(torch.nn.Module):
    """Adds noise to a loss, the more the larger its one weight is."""

    def __init__(self, noise_factor: float = 0.1) -> None:
        super().__init__()
        self.noise_factor = torch.nn.Parameter(torch.tensor(noise_factor))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the noise."""
        return torch.randn(1, device=loss.device) * loss * self.noise_factor


def _plugins(first: str, second: str) -> dict[str, Any]:
    needs_deepspeed()
    plugin = accelerate.DeepSpeedPlugin
    stages = (ds_config_file["zero2"], ds_config_file["zero3"])
    return {name: plugin(hf_ds_config=stage) for name, stage in zip((first, second), stages, strict=True)}


def _check_learning(scores: list[float], bound: float | None) -> None:
    wanted = 0.6 if bound is None else bound
    expect(max(scores) >= wanted, f"the accuracies are {scores}, and one should be at least {wanted}")


def single_model_training(config: dict[str, Any], args: Any) -> None:
    """Trains one model, while another one, with settings for inference, has its say in the loss."""
    plugins = _plugins("training", "inference")
    accelerator = Accelerator(deepspeed_plugins=plugins, mixed_precision="bf16")
    expect(accelerator.deepspeed_plugin is plugins["training"], "the first settings are not those in use")
    parts = pair_training.prepare(accelerator, config, args.model_name_or_path)
    accelerator.state.select_deepspeed_plugin("inference")
    expect(accelerator.deepspeed_plugin is plugins["inference"], "the selected settings are not those in use")
    noise = accelerator.prepare(NoiseModel()).eval()
    accelerator.state.select_deepspeed_plugin("training")
    scores = []
    for _ in range(config["num_epochs"]):
        parts.model.train()
        for batch in parts.train:
            loss = parts.model(**batch).loss
            with torch.no_grad():
                added = noise(loss)
            accelerator.backward(loss + added)
            parts.optimizer.step()
            parts.scheduler.step()
            parts.optimizer.zero_grad()
        scores.append(pair_training.accuracy(accelerator, parts))
    _check_learning(scores, args.performance_lower_bound)


def multiple_model_training(config: dict[str, Any], args: Any) -> None:
    """Trains two models in turns, with an accelerator each."""
    first = Accelerator(deepspeed_plugins=_plugins("zero2", "zero3"), mixed_precision="bf16")
    trained = [(first, pair_training.prepare(first, config, args.model_name_or_path))]
    second = Accelerator()
    second.state.select_deepspeed_plugin("zero3")
    trained.append((second, pair_training.prepare(second, config, args.model_name_or_path)))
    scores: list[list[float]] = [[], []]
    for _ in range(config["num_epochs"]):
        for number, (accelerator, parts) in enumerate(trained):
            accelerator.state.select_deepspeed_plugin(f"zero{number + 2}")
            pair_training.train_epoch(accelerator, parts)
            scores[number].append(pair_training.accuracy(accelerator, parts))
    for each in scores:
        _check_learning(each, args.performance_lower_bound)


def main() -> None:
    """Reads the command line, and runs both trainings."""
    config, args = pair_training.parse(__doc__, 3, performance_lower_bound=pair_training.LOWER_BOUND)
    for training in (single_model_training, multiple_model_training):
        run_checks(training, given=({**config, "batch_size": 8}, args))
        AcceleratorState._reset_state(True)


if __name__ == "__main__":
    main()
