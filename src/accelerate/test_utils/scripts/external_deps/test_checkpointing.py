"""Checks that a training goes on where it was saved: trains and saves, or loads and compares.

`accelerate launch test_checkpointing.py --output_dir FOLDER --partial_train_epoch 1`, and then
`accelerate launch test_checkpointing.py --output_dir FOLDER --resume_from_checkpoint FOLDER/epoch_0`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.accelerator import Accelerator
from accelerate.test_utils import pair_training
from accelerate.test_utils.checks import expect_equal
from accelerate.test_utils.sentence_pairs import Scores, evaluate
from accelerate.test_utils.sentence_pairs import get_dataloaders as get_dataloaders

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 32


def evaluation_loop(accelerator: Accelerator, model: Any, eval_dataloader: Any, metric: Any) -> float:
    """The accuracy of the model; `metric` takes batches, and computes."""
    return evaluate(accelerator, model, eval_dataloader, metric)["accuracy"]


def _state(accelerator: Accelerator, parts: pair_training.Prepared, epoch: int) -> dict[str, Any]:
    """What is the same after saving and after loading."""
    return {
        "accuracy": evaluation_loop(accelerator, parts.model, parts.evaluation, Scores()),
        "lr": parts.scheduler.get_last_lr()[0],
        "optimizer_lr": parts.optimizer.param_groups[0]["lr"],
        "epoch": epoch,
    }


def training_function(config: dict[str, Any], args: Any) -> None:
    """Trains, saving each epoch; or loads an epoch, and compares it with what was written about it."""
    accelerator = Accelerator()
    parts = pair_training.prepare(accelerator, config, args.model_name_or_path)
    output = Path(args.output_dir)
    if args.resume_from_checkpoint:
        epoch = int(Path(args.resume_from_checkpoint).name.removeprefix("epoch_"))
        accelerator.load_state(args.resume_from_checkpoint)
        wanted = json.loads((output / f"state_{epoch}.json").read_text())
        expect_equal(_state(accelerator, parts, epoch), wanted, "the state after loading")
        accelerator.print(f"epoch {epoch}, loaded: {wanted}")
    else:
        last = config["num_epochs"] if args.partial_train_epoch is None else args.partial_train_epoch
        for epoch in range(last):
            pair_training.train_epoch(accelerator, parts)
            accelerator.save_state(str(output / f"epoch_{epoch}"))
            state = _state(accelerator, parts, epoch)
            if accelerator.is_main_process:
                (output / f"state_{epoch}.json").write_text(json.dumps(state))
            accelerator.print(f"epoch {epoch}: {state}")
    accelerator.end_training()


def main() -> None:
    """Reads the command line, and runs."""
    options: dict[str, dict[str, Any]] = {
        "output_dir": pair_training.OUTPUT_DIR,
        "resume_from_checkpoint": {"help": "the folder of an epoch that was saved"},
        "partial_train_epoch": {"type": int, "help": "end after so many epochs"},
    }
    training_function(*pair_training.parse(__doc__, 2, **options))


if __name__ == "__main__":
    main()
