"""Checks `gather_for_metrics`: what is computed on all processes is what one process computes, and no sample is twice.

`accelerate launch test_metrics.py`; any number of processes.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate.accelerator import Accelerator
from accelerate.config.data import DataLoaderConfiguration
from accelerate.config.enums import DistributedType
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.random import set_seed
from accelerate.state import AcceleratorState, PartialState
from accelerate.test_utils.checks import expect, expect_equal, run_checks
from accelerate.test_utils.sentence_pairs import Classifier, PairDataset, Scores, collate, evaluate, make_pairs
from accelerate.test_utils.training import RegressionDataset, RegressionModel


class ListHandler(logging.Handler):
    """Keeps what is logged in `logs`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logs: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record."""
        self.logs.append(record)


class _Stream(IterableDataset[Any]):
    """A list as a stream that knows its length."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def _accelerator(dispatch_batches: bool, split_batches: bool) -> Accelerator:
    AcceleratorState._reset_state()
    settings = DataLoaderConfiguration(dispatch_batches=dispatch_batches, split_batches=split_batches)
    return Accelerator(dataloader_config=settings)


def get_basic_setup(accelerator: Accelerator, num_samples: int = 82, batch_size: int = 16) -> tuple[Any, Any, Any]:
    """A plain model, a prepared copy, and a prepared loader."""
    set_seed(42)
    model = RegressionModel()
    model.first_batch = False
    loader = DataLoader(RegressionDataset(length=num_samples), batch_size=batch_size)
    prepared, loader = accelerator.prepare(copy.deepcopy(model), loader)
    return model.to(accelerator.device), prepared, loader


def get_dataloader(accelerator: Accelerator, use_longest: bool = False) -> DataLoader[Any]:
    """A loader of pairs of sentences, in order; `use_longest` pads each batch by itself."""
    pad = collate if use_longest else functools.partial(collate, length=64)
    return DataLoader(PairDataset(make_pairs(83)), collate_fn=pad, batch_size=16)


def get_mrpc_setup(dispatch_batches: bool, split_batches: bool) -> tuple[dict[str, list[Any]], Accelerator]:
    """Model, loader and device: prepared ones under "ddp", and plain ones under "no"."""
    accelerator = _accelerator(dispatch_batches, split_batches)
    loader = get_dataloader(accelerator, use_longest=not dispatch_batches)
    torch.manual_seed(0)
    model = Classifier().to(accelerator.device)
    prepared, prepared_loader = accelerator.prepare(copy.deepcopy(model), loader)
    device = accelerator.device
    return {"ddp": [prepared, prepared_loader, device], "no": [model, loader, device]}, accelerator


def generate_predictions(model: Any, dataloader: Any, accelerator: Accelerator) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model makes of all samples, and what it should."""
    both = []
    for batch in dataloader:
        with torch.no_grad():
            both.append(accelerator.gather_for_metrics((model(batch["x"]), batch["y"])))
    outputs, targets = zip(*both, strict=True)
    return torch.cat(outputs), torch.cat(targets)


def test_torch_metrics(
    accelerator: Accelerator,
    num_samples: int = 82,
    dispatch_batches: bool = False,
    split_batches: bool = False,
    batch_size: int = 16,
) -> None:
    """Each sample comes once."""
    _, model, loader = get_basic_setup(accelerator, num_samples, batch_size)
    outputs, targets = generate_predictions(model, loader, accelerator)
    expect_equal((len(outputs), len(targets)), (num_samples, num_samples), "the numbers of outputs and targets")


def _torch_metrics(num_samples: int, dispatch_batches: bool, split_batches: bool) -> None:
    test_torch_metrics(_accelerator(dispatch_batches, split_batches), num_samples)


def test_mrpc(dispatch_batches: bool = False, split_batches: bool = False) -> None:
    """Scores of all processes together are those of one process that has seen everything."""
    setup, accelerator = get_mrpc_setup(dispatch_batches, split_batches)
    model, loader, device = setup["no"]
    scores = Scores()
    for batch in loader:
        with torch.no_grad():
            predictions = model(**batch.to(device)).logits.argmax(dim=-1)
        scores.add_batch(predictions, batch["labels"])
    wanted = scores.compute()
    model, loader, _ = setup["ddp"]
    seen = evaluate(accelerator, model, loader, Scores())
    for name, value in wanted.items():
        expect(math.isclose(seen[name], value), f"{name} is {seen[name]}, and {value} on one process")


def _gather_stream(items: Any) -> Any:
    """A dispatched stream gives each item once, without a word in the log."""
    AcceleratorState._reset_state()
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_Stream(items), batch_size=4))
    logger, handler = logging.getLogger("accelerate.accelerator"), ListHandler()
    logger.addHandler(handler)
    try:
        seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).tolist()
    finally:
        logger.removeHandler(handler)
    expect_equal(seen, list(range(len(items))), "the items")
    expect_equal([record.getMessage() for record in handler.logs], [], "the log")
    return loader


def test_gather_for_metrics_with_non_tensor_objects_iterable_dataset() -> None:
    """Each item of a stream of plain numbers comes once."""
    _gather_stream(list(range(30)))


def test_gather_for_metrics_with_iterable_dataset() -> None:
    """Each item of a stream of tensors comes once; the first process reads it for all."""
    loader = _gather_stream(torch.arange(30))
    expect(isinstance(loader, DataLoaderDispatcher), f"the loader is a {type(loader).__name__}")


def test_gather_for_metrics_drop_last() -> None:
    """Where the rest is dropped, the last batch is whole, and nothing is cut off it."""
    accelerator = Accelerator()
    size, processes = 5, accelerator.num_processes
    items: Any = range(10 * processes + 1)
    loader: DataLoader[Any] = DataLoader(items, batch_size=size, drop_last=True)
    batches = [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(loader)]
    expect_equal([len(batch) for batch in batches], [size * processes] * 2, "the sizes of the batches")


def main() -> None:
    """Runs all checks, with every way of handing out batches."""
    dispatched = (False,) if PartialState().distributed_type == DistributedType.XLA else (True, False)
    for split, dispatch in itertools.product((True, False), dispatched):
        settings = {"dispatch_batches": dispatch, "split_batches": split}
        run_checks(
            functools.partial(test_mrpc, **settings),
            functools.partial(_torch_metrics, num_samples=99, **settings),
        )
    run_checks(
        functools.partial(_torch_metrics, num_samples=512, dispatch_batches=False, split_batches=False),
        test_gather_for_metrics_with_iterable_dataset,
        test_gather_for_metrics_with_non_tensor_objects_iterable_dataset,
        test_gather_for_metrics_drop_last,
    )
    PartialState().destroy_process_group()


def _mp_fn(index: int) -> None:
    """What torch_xla's launcher calls on each process."""
    main()


if __name__ == "__main__":
    main()
