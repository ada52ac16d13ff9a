"""Freeing memory, and finding the batch size that fits into it."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.comm import Communicator, current
from accelerate.devices import DEVICES
from accelerate.state import PartialState


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Gives memory that torch keeps for later back to the device, after a garbage collection if asked for."""
    if garbage_collection:
        gc.collect()
    for device in DEVICES:
        if device.available():
            device.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drops objects and frees their memory: `a, b = release_memory(a, b)`."""
    dropped: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return dropped


def should_reduce_batch_size(exception: Exception) -> bool:
    """Says whether an exception means that memory ran out."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    message = str(exception.args[0])
    return any(part in message for part in ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED.", "can't allocate memory"))


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Calls a function with ever smaller batch sizes, each 0.9 of the one before, until it fits into memory.

    The batch size is the function's first argument and is left out by the caller:

        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size, model): ...

        train(model)

    Several processes go on together: if memory runs out on one of them, all try again with the smallest size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    attempt = function
    batch_size = starting_batch_size

    @functools.wraps(attempt)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _check_arguments(attempt, args)
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            outcome = _try(attempt, batch_size, args, kwargs)
            if outcome.out_of_memory:
                clear_device_cache(garbage_collection=True)
                batch_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            agreed = _agree(outcome, batch_size)
            if agreed is None:
                return outcome.result
            batch_size = agreed
        raise RuntimeError("No batch size fits into memory, not even 1; free memory or use a smaller model.")

    return search


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not names:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"There is no place for the batch size: give `{name}` a first parameter for it.")
    if len(args) + 1 > len(names):
        call = ", ".join(f"{name}={value!r}" for name, value in zip(names[1:], args[1:], strict=False))
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"`{name}` is given its batch size by the decorator; leave it out: `{name}({call})`.")


@dataclass
class _Outcome:
    result: Any = None
    error: Exception | None = None
    out_of_memory: bool = False


def _try(function: Callable[..., Any], batch_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome:
    try:
        return _Outcome(result=function(batch_size, *args, **kwargs))
    except Exception as error:
        # An exception keeps the frames of the failed attempt alive, and with them the memory to be freed.
        if should_reduce_batch_size(error):
            return _Outcome(out_of_memory=True)
        return _Outcome(error=error)


def _agree(outcome: _Outcome, batch_size: int) -> int | None:
    """Returns the size that all ranks try next, or None when all have succeeded."""
    # Without a state there is no world to agree with, and asking for one would set it up.
    comm = current() if PartialState._shared_state else Communicator()
    retry = outcome.out_of_memory
    if comm.size > 1:
        error = None if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
        reports = comm.gather_objects((retry, batch_size, error))
        failed = [f"rank {rank} ({report[2]})" for rank, report in enumerate(reports) if report[2] is not None]
        if failed and outcome.error is None:
            raise RuntimeError(f"The search for a batch size ends here, because it failed on {', '.join(failed)}.")
        retry = any(report[0] for report in reports)
        batch_size = min(report[1] for report in reports)
    if outcome.error is not None:
        raise outcome.error
    return batch_size if retry else None
