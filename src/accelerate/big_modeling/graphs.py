"""Keeping hooks out of the graphs of torch.compile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from accelerate.torch_internals.compile import compiler_module, keep_out_of_graphs

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Let torch.compile run a function as it is, between two graphs.

    `torch.compiler.disable` does this too, and loads the whole compiler (over a second) where nothing is compiled.
    """
    disabled: Callable[..., Any] | None = None
    compiler = compiler_module()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if compiler not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    keep_out_of_graphs(call, "hooks run between graphs")
    return call  # type: ignore[return-value]
