"""What the scripts that train on pairs of sentences have in common: options, and everything prepared."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

from accelerate.accelerator import Accelerator
from accelerate.random import set_seed
from accelerate.test_utils.sentence_pairs import Scores, evaluate, get_dataloaders, load_classifier

# The steps are few, and the model is small and new: it takes larger ones than a pretrained one would.
CONFIG: dict[str, Any] = {"lr": 2e-2, "seed": 42, "batch_size": 16}


def parse(description: str | None, num_epochs: int, **options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Reads the command line, and returns a configuration and the options.

    options: keyword arguments of `add_argument`, by the name of the option.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--model_name_or_path",
        default="bert-base-cased",
        help="a folder with a model; any other name stands for a small model that is made in place",
    )
    parser.add_argument("--num_epochs", type=int, default=num_epochs, help="how often the data are gone through")
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    return {**CONFIG, "num_epochs": args.num_epochs}, args


OUTPUT_DIR: dict[str, Any] = {"default": ".", "help": "the folder for what is written"}
LOWER_BOUND: dict[str, Any] = {"type": float, "help": "the accuracy that the best epoch has to reach"}


class Prepared(NamedTuple):
    """All that a training needs, and how many steps the scheduler has been promised."""

    model: Any
    optimizer: Any
    train: Any
    evaluation: Any
    scheduler: Any
    steps: int


def prepare(
    accelerator: Accelerator, config: dict[str, Any], name: str, sizes: tuple[int, int] = (320, 160), **options: Any
) -> Prepared:
    """Makes and prepares everything; the learning rate falls to zero over the training.

    sizes: numbers of samples for training and evaluation. options: those of the model.
    """
    set_seed(config["seed"])
    train, evaluation = get_dataloaders(accelerator, config["batch_size"], name, *sizes)
    model = load_classifier(name, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    steps = len(train) * int(config["num_epochs"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    prepared = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    return Prepared._make([*prepared, steps])


def train_epoch(accelerator: Accelerator, parts: Prepared, batches: Any = None) -> None:
    """Goes through the data once, or through the given batches."""
    parts.model.train()
    for batch in parts.train if batches is None else batches:
        with accelerator.accumulate(parts.model):
            accelerator.backward(parts.model(**batch).loss)
            parts.optimizer.step()
            parts.scheduler.step()
            parts.optimizer.zero_grad()


def accuracy(accelerator: Accelerator, parts: Prepared) -> float:
    """The share of right answers on the samples for evaluation."""
    return evaluate(accelerator, parts.model, parts.evaluation, Scores())["accuracy"]
