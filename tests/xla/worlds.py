"""A process of its own on an XLA device, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.harness import run_world
from tests.unit.accelerator.toys import ALONE


def on_xla(function: Callable[..., Any], *args: Any, **env: str) -> Any:
    """What `function` returns in a process that torch_xla compiles for."""
    return run_world(function, 1, *args, env=ALONE | {"ACCELERATE_USE_CPU": None} | env, timeout=200)[0]


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    return run_world(function, 1, *args, env=ALONE | {"PJRT_DEVICE": None}, timeout=200)[0]
