"""A process of its own on an XLA device, several of them with a device each, or one on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.harness import run_world
from tests.unit.accelerator.toys import ALONE
from tests.xla.fakes import several_devices


def on_xla(function: Callable[..., Any], *args: Any, **env: str) -> Any:
    """What `function` returns in a process that torch_xla compiles for."""
    return run_world(function, 1, *args, env=ALONE | {"ACCELERATE_USE_CPU": None} | env, timeout=200)[0]


def on_several(function: Callable[..., Any], *args: Any, processes: int = 2, **env: str) -> list[Any]:
    """What `function` returns on each of several processes, by their ranks; see `fakes.py`."""
    results = run_world(_with_a_device, processes, function, *args, env={"ACCELERATE_USE_CPU": None} | env, timeout=200)
    return [value for _, value in sorted(results, key=lambda result: result[0])]


def _with_a_device(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    from accelerate.state import PartialState

    several_devices()
    value = function(*args)
    return PartialState().process_index, value


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    return run_world(function, 1, *args, env=ALONE | {"PJRT_DEVICE": None}, timeout=200)[0]
