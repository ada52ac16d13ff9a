"""Checks a whole training: learning rates from first to last step, the accuracy, and the saved model.

`accelerate launch test_performance.py --output_dir FOLDER --performance_lower_bound 0.9`; with `--tp_plan auto
--tp_size 2` the model is spread over two processes, for which the transformers library is needed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from accelerate.accelerator import Accelerator
from accelerate.constants import SAFE_WEIGHTS_NAME
from accelerate.parallelism_config import ParallelismConfig
from accelerate.test_utils import pair_training
from accelerate.test_utils.checks import expect, expect_equal
from accelerate.test_utils.sentence_pairs import PAD
from accelerate.test_utils.sentence_pairs import get_dataloaders as get_dataloaders

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 32


def _check_rate(accelerator: Accelerator, parts: pair_training.Prepared, lr: float, taken: int) -> None:
    """The scheduler takes a step per process for each of the optimizer, which skips none without a scaler."""
    if accelerator.mixed_precision == "no":
        wanted = lr * max(0.0, 1 - taken / parts.steps)
        rate = parts.scheduler.get_last_lr()[0]
        expect(math.isclose(rate, wanted, abs_tol=1e-12), f"after {taken} steps the learning rate is {rate}: {wanted=}")


def _check_saved(accelerator: Accelerator, model: Any, folder: Path) -> None:
    """The file has all weights, with the values of the model."""
    weights = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(folder))
    accelerator.wait_for_everyone()
    saved = load_file(folder / SAFE_WEIGHTS_NAME)
    if accelerator.is_main_process:
        expect_equal(set(saved), set(weights), "the names in the saved file")
        for name, value in saved.items():
            expect_equal(value, weights[name].cpu(), name)


def training_function(config: dict[str, Any], args: Any) -> None:
    """Trains, and checks along the way."""
    sharding = ParallelismConfig(tp_size=args.tp_size) if args.tp_size is not None else None
    accelerator = Accelerator(parallelism_config=sharding)
    options = {"tp_plan": args.tp_plan, "tp_size": args.tp_size}
    dtype = getattr(torch, args.model_dtype) if args.model_dtype else None
    given = {name: value for name, value in options.items() if value is not None}
    parts = pair_training.prepare(accelerator, config, args.model_name_or_path, dtype=dtype, **given)
    model_config = getattr(accelerator.unwrap_model(parts.model), "config", None)
    if args.add_pad_token and model_config is not None and model_config.pad_token_id is None:
        model_config.pad_token_id = PAD

    accumulated = accelerator.gradient_accumulation_steps
    batches = iter(parts.train)
    pair_training.train_epoch(accelerator, parts, [next(batches) for _ in range(accumulated)])
    _check_rate(accelerator, parts, config["lr"], accelerator.num_processes // (args.tp_size or 1))
    results = {}
    for epoch in range(config["num_epochs"]):
        pair_training.train_epoch(accelerator, parts, batches)
        batches = parts.train
        results[f"epoch-{epoch}"] = pair_training.accuracy(accelerator, parts)
        accelerator.print(f"epoch {epoch}: accuracy {results[f'epoch-{epoch}']:.3f}")
    if accumulated == 1:
        _check_rate(accelerator, parts, config["lr"], parts.steps)

    best, bound = max(results.values()), args.performance_lower_bound
    expect(bound is None or best >= bound, f"the best accuracy is {best}, and should be at least {bound}")
    folder = Path(args.output_dir)
    if accelerator.is_main_process:
        (folder / "all_results.json").write_text(json.dumps(results))
    if args.tp_plan is None:
        _check_saved(accelerator, parts.model, folder)
    accelerator.end_training()


def main() -> None:
    """Reads the command line, and runs."""
    options: dict[str, dict[str, Any]] = {
        "output_dir": pair_training.OUTPUT_DIR,
        "performance_lower_bound": pair_training.LOWER_BOUND,
        "add_pad_token": {"type": bool, "default": False, "help": "give the model a padding token, if it has none"},
        "tp_plan": {"help": "'auto' spreads the model, as its library says"},
        "tp_size": {"type": int, "help": "over how many processes"},
        "model_dtype": {"choices": ["bfloat16", "float16", "float32"], "help": "the dtype of the weights"},
    }
    training_function(*pair_training.parse(__doc__, 3, **options))


if __name__ == "__main__":
    main()
