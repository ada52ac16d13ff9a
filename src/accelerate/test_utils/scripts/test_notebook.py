"""Checks `notebook_launcher`: ways to meet, restarts, the end of all when one fails.

`ACCELERATE_NUM_PROCESSES=2 python -m accelerate.test_utils.scripts.test_notebook`; one process by default.
"""

from __future__ import annotations

import importlib
import os
import time
import unittest
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate.available import is_bnb_available
from accelerate.comm import ops
from accelerate.launchers import notebook_launcher
from accelerate.state import PartialState
from accelerate.test_utils.cases import assert_exception
from accelerate.test_utils.checks import expect, expect_equal, run_checks
from accelerate.test_utils.requirements import require_bnb

NUM_PROCESSES = int(os.environ.get("ACCELERATE_NUM_PROCESSES", "1"))
require_multi_process = unittest.skipUnless(
    NUM_PROCESSES > 1, "it needs several processes: set ACCELERATE_NUM_PROCESSES"
)


def basic_function() -> None:
    """Meets the others, and counts them."""
    state = PartialState()
    expect_equal(ops.gather_object([state.process_index]), list(range(NUM_PROCESSES)), "the processes")


def tough_nut_function(queue: Any) -> None:
    """Fails as often as the number in the queue says."""
    # One process takes the number, and puts it back less one; the others find nothing.
    try:
        trial = queue.get(timeout=0.5)
    except Empty:
        return
    if trial > 0:
        queue.put(trial - 1)
        raise RuntimeError(f"{trial} more attempts")


def bipolar_sleep_function(sleep_sec: int) -> None:
    """Fails on even processes, and sleeps on the others."""
    if PartialState().process_index % 2 == 0:
        raise RuntimeError("even processes do not sleep")
    time.sleep(sleep_sec)


def assert_clean_cuda_fork_function() -> None:
    """Uses the GPU, if there is one: a fork of a process that has used it before could not."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    expect(PartialState().num_processes == NUM_PROCESSES, "not all processes are here")


def _launch(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # A port that is free: others may hold the usual one.
    notebook_launcher(function, args, num_processes=NUM_PROCESSES, use_port="0", **kwargs)


def test_can_initialize() -> None:
    """The processes meet."""
    _launch(basic_function)


@require_multi_process
def test_clean_cuda_fork() -> None:
    """The launcher leaves CUDA to the processes that it forks."""
    _launch(assert_clean_cuda_fork_function)


@require_multi_process
def test_static_rdzv_backend() -> None:
    """The processes meet where they are told to."""
    _launch(basic_function, rdzv_backend="static")


@require_multi_process
def test_c10d_rdzv_backend() -> None:
    """The processes meet through torch elastic's own store."""
    _launch(basic_function, rdzv_backend="c10d")


@require_multi_process
def test_fault_tolerant(max_restarts: int = 3) -> None:
    """All processes are started again after one has failed, as often as is allowed, and not more often."""
    queue = torch.multiprocessing.get_context("fork").Queue()
    queue.put(max_restarts)
    _launch(tough_nut_function, queue, max_restarts=max_restarts)
    expect(queue.empty(), "the last attempt is still to come")
    queue.put(1)
    with assert_exception(ChildFailedError, "1 more attempts"):
        _launch(tough_nut_function, queue)


@require_multi_process
def test_monitoring(monitor_interval: float = 0.01, sleep_sec: int = 100) -> None:
    """A process that fails ends the others, long before they would end by themselves."""
    start = time.monotonic()
    with assert_exception(ChildFailedError, "even processes do not sleep"):
        _launch(bipolar_sleep_function, sleep_sec, monitor_interval=monitor_interval)
    took = time.monotonic() - start
    expect(took < sleep_sec, f"the failure was seen after {took:.0f} seconds")


@require_bnb
def test_problematic_imports() -> None:
    """A library that touches CUDA at import does no harm, or the error says what does."""
    importlib.import_module("bitsandbytes")
    if not torch.cuda.is_initialized():
        _launch(basic_function)
        return
    with assert_exception(RuntimeError, "CUDA was started"):
        _launch(basic_function)


def main() -> None:
    """Runs all checks."""
    run_checks(
        test_can_initialize,
        test_clean_cuda_fork,
        test_static_rdzv_backend,
        test_c10d_rdzv_backend,
        test_fault_tolerant,
        test_monitoring,
        *([test_problematic_imports] if is_bnb_available() else []),
    )


if __name__ == "__main__":
    main()
