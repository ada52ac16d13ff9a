"""Loaders of an Accelerator: what `prepare` makes of one, and whether a scheduler fits to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from accelerate.accelerator.base import AcceleratorBase
from accelerate.accelerator.preemption import OutlivesSignals, SaveAndEnd
from accelerate.accelerator.prepare import check_object, mark
from accelerate.accelerator.uneven import UnevenEnd, watch_forwards
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    prepare_data_loader,
)
from accelerate.data_loader.base import PreparedLoader
from accelerate.data_loader.samplers import cuts_in_order
from accelerate.errors import warn
from accelerate.scheduler import moves


def prepare(
    accelerator: AcceleratorBase,
    loader: Any,
    device_placement: bool | None,
    slice_fn_for_dispatch: Callable[..., Any] | None,
) -> Any:
    """See `Accelerator.prepare_data_loader`."""
    check_object("prepare_data_loader", loader, "loaders")
    config = accelerator.dataloader_config
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        split_batches=config.split_batches,
        put_on_device=accelerator.device_placement if device_placement is None else device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=config.dispatch_batches,
        even_batches=config.even_batches,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        shuffle=config.shuffle,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
        torch_device_mesh=accelerator.torch_device_mesh,
        data_shares=accelerator._strategy.data_shares(),
    )
    prepared.gradient_state = accelerator.gradient_state
    prepared.position.exact_resume = config.exact_resume
    prepared.notes_samples = accelerator._stops_at_nonfinite is not None and isinstance(prepared, DataLoaderShard)
    if accelerator._preemption is not None:
        prepared.between_batches = SaveAndEnd(accelerator)
        inside = prepared.base_dataloader
        inside.worker_init_fn = OutlivesSignals(inside.worker_init_fn)
    if accelerator._strategy.needs_even_batches and _ends_unevenly(prepared):
        raise ValueError(
            "With even_batches=False, some processes get one batch fewer than others here, but a sharded model "
            "must be called equally often on all of them: use even_batches=True, or drop_last=True in the loader."
        )
    if accelerator._stops_at_nonfinite is not None and _ends_unevenly(prepared):
        raise ValueError(
            'With even_batches=False, some processes get one batch fewer than others here, but nonfinite="stop" '
            'needs all of them at each step: pass nonfinite="skip" to the Accelerator, or use even_batches=True.'
        )
    if isinstance(prepared, DataLoaderShard) and accelerator.num_processes > 1 and not config.even_batches:
        prepared.on_uneven_end = UnevenEnd(accelerator)
        if not accelerator._watches_forwards:
            accelerator._watches_forwards = True
            for model in accelerator._models:
                watch_forwards(accelerator, model)
    if accelerator.is_main_process and not isinstance(loader, PreparedLoader):
        _warn_of_nothing_to_read(loader, prepared, accelerator.num_processes)
        if accelerator.num_processes > 1 and not config.even_batches:
            _warn_if_filled_up(prepared)
    mark(prepared)
    if not any(prepared is loader for loader in accelerator._dataloaders):
        accelerator._dataloaders.append(prepared)
    return prepared


def _warn_of_nothing_to_read(loader: Any, prepared: Any, processes: int) -> None:
    """A loop over nothing ends like one that has trained, and says nothing by itself."""
    if not loader.drop_last or not cuts_in_order(loader.batch_sampler):
        return
    try:
        samples, length = len(loader.sampler), len(prepared)
    except (TypeError, NotImplementedError):  # endless, or not known
        return
    finally:
        prepared.length_asked = False  # not by the script
    step = prepared.total_batch_size
    if length == 0 and 0 < samples < step:
        of = f"the {step} of one step" if processes == 1 else f"the {step} of one step of {processes} processes"
        warn(
            f"No batch comes from this loader: drop_last=True leaves out all of its {samples} samples, which are fewer "
            f"than {of}; use a smaller batch_size, fewer processes, or drop_last=False."
        )


def _warn_if_filled_up(prepared: Any) -> None:
    """Only batches of indices can end unevenly: what reads a stream may be in other processes, and does not tell."""
    stream = isinstance(prepared.dataset, IterableDatasetShard)
    if (stream or isinstance(prepared, DataLoaderDispatcher)) and not prepared._drop_last:
        does = "reads a stream" if stream else "dispatches"
        warn(
            f"even_batches=False changes nothing for this loader, because it {does}: samples from the start "
            "fill up its last batches; `gather_for_metrics` drops them."
        )


def _ends_unevenly(loader: Any) -> bool:
    """Whether the first process gets more batches than the last one."""
    shard = loader.batch_sampler if isinstance(loader, DataLoaderShard) else None
    if not isinstance(shard, BatchSamplerShard) or shard.even_batches:
        return False
    processes = shard.num_processes
    lengths = {
        len(BatchSamplerShard(shard.batch_sampler, processes, index, shard.split_batches, even_batches=False))
        for index in (0, processes - 1)
    }
    return len(lengths) > 1


def says_horizon(accelerator: AcceleratorBase, steps: int, each: int) -> bool:
    """Says when a schedule ends, if that is after whole epochs of a sharded loader, but not of the loader itself: most
    likely it was divided already, though a script may mean it. Returns whether that is so.

    Only where the script has asked that loader how long it is, and no other loader explains the number.

    each: how many steps of the schedule one of the optimizer is.
    """
    accumulated, divided, shares = accelerator.gradient_accumulation_steps, 0, 1
    for loader in accelerator._dataloaders:
        shard = getattr(loader, "batch_sampler", None)
        if not isinstance(shard, BatchSamplerShard):
            continue
        rounds, batches = math.ceil(len(shard) / accumulated), shard.total_length
        # What an epoch comes to for scripts that count right: in steps, or in batches.
        right = (batches, math.ceil(batches / accumulated), rounds * shard.num_processes)
        if any(epoch and steps % epoch == 0 for epoch in right):
            return False
        if getattr(loader, "length_asked", False) and rounds > 1 and steps % rounds == 0:
            divided, shares = rounds, shard.num_processes
    if divided and accelerator.is_main_process:
        warn(
            f"This schedule of {steps} steps ends after {steps // each} optimizer steps, or "
            f"{round(steps / shares / divided, 2):g} epochs: {moves(each)}. If it should last longer, compute its "
            "length from the loader as it was before `prepare`, or do not prepare the scheduler."
        )
    return bool(divided)
