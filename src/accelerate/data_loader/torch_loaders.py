"""Making torch loaders that read as others do, with the same batches or without the first ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from accelerate.available import is_torchdata_stateful_dataloader_available
from accelerate.data_loader.samplers import SamplerShard
from accelerate.data_loader.skip_samplers import SkipSampler, without_batches, without_samples

# Everything a torch DataLoader was made with, apart from what decides its batches.
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def kept_arguments(loader: Any) -> dict[str, Any]:
    """The arguments for a new loader that reads in the same way as `loader`."""
    arguments = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if arguments.get("num_workers") == 0:
        # torch refuses these without workers, even at their own defaults
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            arguments.pop(name, None)
    if not arguments.get("pin_memory_device"):
        arguments.pop("pin_memory_device", None)  # deprecated: naming it at all makes torch warn
    return arguments


def same_batches(loader: Any) -> dict[str, Any]:
    """The arguments for a new loader with the same batches as `loader`."""
    if isinstance(loader.dataset, IterableDataset):
        # torch makes up samplers for these, and refuses to be given them
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {"batch_size": None, "sampler": loader.sampler}


def skipped_batches(loader: Any, count: int) -> dict[str, Any] | None:
    """The arguments for a new loader whose sampler leaves `count` batches out; None where no sampler decides."""
    return None if isinstance(loader.dataset, IterableDataset) else _without(loader, count, without_batches)


def skipped_samples(loader: Any, count: int) -> dict[str, Any]:
    """The arguments for a new loader whose sampler leaves `count` samples out."""
    return _without(loader, count, without_samples)


def _without(loader: Any, count: int, without: Callable[[Any, int], Any]) -> dict[str, Any]:
    """The arguments for a new loader, changed by `without` where they make batches."""

    def left(argument: str, value: Any) -> Any:
        if value is None:  # batch_size=None
            return None
        # A batch sampler need not be of torch's class.
        if argument == "batch_sampler" or isinstance(value, (BatchSampler, SamplerShard)):
            return without(value, count)
        return SkipSampler(value, count)

    return {argument: left(argument, value) for argument, value in same_batches(loader).items()}


def stateful_loader(dataset: Any, **kwargs: Any) -> Any:
    """A loader of torchdata."""
    if not is_torchdata_stateful_dataloader_available():
        raise ImportError("use_stateful_dataloader=True needs torchdata 0.8 or later: pip install 'torchdata>=0.8'")
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        # torchdata calls what torch is about to drop; nothing that a script could change.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(dataset, **kwargs)
