"""What the scripts of this package have in common: saying what should hold, and running one check after another."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate.available import is_deepspeed_available
from accelerate.comm import ops
from accelerate.environments import detect
from accelerate.state import PartialState
from accelerate.strategies import STRATEGIES


def expect(condition: bool, what: str) -> None:
    """Raises an AssertionError that says what was seen instead; unlike `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(what)


def expect_equal(seen: Any, wanted: Any, what: str) -> None:
    """Compares values, or tensors bit by bit, and shows both where they differ."""
    tensors = isinstance(seen, torch.Tensor) and isinstance(wanted, torch.Tensor)
    same = torch.equal(seen, wanted) if tensors else seen == wanted
    expect(bool(same), f"{what}: {wanted} was expected, and {seen} came")


def needs(condition: bool, what: str) -> None:
    """Leaves a check out where what it needs is not there; all processes have to agree on that."""
    if not condition:
        raise unittest.SkipTest(f"it needs {what}")


def needs_deepspeed() -> None:
    """Leaves a check out where there is no DeepSpeed to run it with: the library, or our part of it."""
    needs(is_deepspeed_available(), "the deepspeed library")
    needs(
        any("deepspeed" in row.module for row in STRATEGIES),
        "the engine for DeepSpeed, which this version of accelerate does not have yet",
    )


def run_checks(*checks: Callable[..., Any], given: tuple[Any, ...] = ()) -> None:
    """Runs checks one after another, with the same arguments, and says on the first process how each went.

    A check fails with its exception, which ends this process, and the launcher then ends the others.
    """
    for check in checks:
        try:
            check(*given)
            outcome = "passed"
        except unittest.SkipTest as reason:
            outcome = f"skipped, because {reason}"
        # Not `PartialState().print`: a check of launchers must not join a world before it launches one.
        if detect(os.environ).rank == 0:
            print(f"{_name(check)}: {outcome}", flush=True)


def _name(check: Callable[..., Any]) -> str:
    if not isinstance(check, functools.partial):
        return check.__name__
    return f"{check.func.__name__}({', '.join(f'{name}={value}' for name, value in check.keywords.items())})"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder for all processes: a temporary one, or in the working folder where machines share no other."""
    state = PartialState()
    world = detect(os.environ)
    parent = tempfile.gettempdir() if world.local_size == world.size else os.getcwd()
    name = [tempfile.mkdtemp(prefix="accelerate-test-", dir=parent) if state.is_main_process else None]
    folder = Path(ops.broadcast_object_list(name)[0])
    try:
        yield folder
        state.wait_for_everyone()
    finally:
        if state.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
