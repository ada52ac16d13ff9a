"""Freeing memory, and finding the batch size that fits into it."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from accelerate.devices import DEVICES
from accelerate.errors import a_kind_of
from accelerate.state import PartialState, attempts


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the memory that torch has cached to the device.

    Args:
        garbage_collection: collect garbage first.
    """
    if garbage_collection:
        gc.collect()
    for device in DEVICES:
        if device.available():
            device.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drop objects and free their memory.

    Args:
        objects: the objects.

    Returns:
        One None per object, to overwrite the variables with: `a, b = release_memory(a, b)`.
    """
    dropped: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return dropped


def should_reduce_batch_size(exception: Exception) -> bool:
    """Tell whether an exception means that memory ran out.

    Args:
        exception: the exception.
    """
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
    """Call a function with ever smaller batch sizes, each 0.9 of the one before, until it fits into memory.

    The batch size is the first argument of the function, and callers leave it out. Prepare models inside the function.

    Ranks continue together: if memory runs out on one of them, all try again with the smallest size. Create the
    Accelerator before the function is called. If others wait for that rank in another process group than the first
    one, that of a device mesh for example, the run ends with a sentence that says so, and starts with the smaller size
    if its launcher restarts it on one machine.

    Args:
        function: the function. Without it, a decorator is returned.
        starting_batch_size: the first batch size.
        reduce_batch_size_fn: a function without arguments that returns the next batch size.

    Returns:
        The decorated function.

    Example:
        ```python
        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size, model): ...

        train(model)
        ```
    """
    given: Any = function
    if given is not None and not callable(given):
        how = f"write `starting_batch_size={given}`" if isinstance(given, int) else "pass a function"
        raise TypeError(f"find_executable_batch_size was given {a_kind_of(given)} for the function: {how}.")
    if not hasattr(starting_batch_size, "__int__"):
        raise TypeError(f"starting_batch_size is {a_kind_of(starting_batch_size)}: give a whole number, such as 128.")
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    search_with = function
    batch_size = starting_batch_size
    name = f"{search_with.__module__}.{getattr(search_with, '__qualname__', '')}"

    @functools.wraps(search_with)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _check_arguments(search_with, args)
        if (remembered := attempts.remembered_size(name)) is not None:
            batch_size = min(batch_size, remembered)
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            with attempts.Attempt(name) as attempt:
                outcome = _try(search_with, batch_size, args, kwargs)
            if outcome.out_of_memory:
                batch_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            agreed = _agree(attempt, outcome, batch_size)
            if agreed is None:
                return outcome.result
            batch_size = agreed
            del outcome  # on a rank that the others have cut off, it holds the frames of the attempt
            clear_device_cache(garbage_collection=True)
        raise RuntimeError("No batch size fits into memory, not even 1; free memory or use a smaller model.")

    return search


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not names:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"`{name}` has no parameter for the batch size: add one as its first.")
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


def _agree(attempt: attempts.Attempt, outcome: _Outcome, batch_size: int) -> int | None:
    """Returns the size that all ranks try next, or None when all have succeeded."""
    report = attempts.report_of(outcome.error, outcome.out_of_memory, batch_size)
    try:
        reports = attempt.exchange(report)
    except attempts.OthersWait as wait:
        if outcome.error is not None:
            _raise(outcome.error, report.cut_off)
        raise _left_behind(wait.reports) from None
    except (RuntimeError, OSError):  # the store is gone
        if outcome.error is not None:
            _raise(outcome.error, report.cut_off)
        raise
    failed = [f"rank {rank} ({each.error})" for rank, each in enumerate(reports) if each.error and not each.cut_off]
    again = any(each.again for each in reports)
    if outcome.error is not None and not (report.cut_off and (failed or again)):
        _raise(outcome.error, report.cut_off)
    if failed:
        raise _failed_on(failed)
    return min(each.size for each in reports) if again else None


def _left_behind(reports: dict[int, attempts.Report]) -> RuntimeError:
    """What a rank ends with whose attempt has not failed otherwise."""
    ranks = [str(rank) for rank, each in reports.items() if each.again]
    if not ranks:
        return _failed_on([f"rank {rank} ({each.error})" for rank, each in reports.items() if each.error])
    who, whom = (f"Rank {ranks[0]}", "it") if len(ranks) == 1 else (f"Ranks {', '.join(ranks)}", "them")
    return RuntimeError(
        f"{who} ran out of memory, while others wait for {whom} in a collective that they cannot leave: start the run "
        f"again with starting_batch_size={min(each.size for each in reports.values())}; on one machine, `accelerate "
        "launch --max_restarts` continues with that size by itself."
    )


def _failed_on(ranks: list[str]) -> RuntimeError:
    return RuntimeError(f"The search for a batch size ends here, because it failed on {', '.join(ranks)}.")


def _raise(error: Exception, cut_off: bool) -> NoReturn:
    if cut_off and attempts.met_again():
        raise RuntimeError(
            f"Rank {PartialState().process_index} has lost the others, after the process group was rebuilt because "
            "memory had run out: prepare models inside the function that takes the batch size."
        ) from error
    raise error
