"""Keeping hooks out of the graphs of torch.compile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Let torch.compile run a function as it is, between two graphs.

    `torch.compiler.disable` does this too, and loads the whole compiler (over a second) where nothing is compiled.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    # What the compiler looks for when it meets a call; and when it is called, it is not to be looked into.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "hooks run between graphs"  # type: ignore[attr-defined]
    _skip(call.__code__)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _skip(code: CodeType) -> None:
    """What torch._dynamo does in `skip_code`, without loading it."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):
        frames.skip_code(code)
    elif hasattr(frames, "_FrameExecStrategy"):
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
