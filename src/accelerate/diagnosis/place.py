"""Where a thread is, read from its stack by another one: in which call, at which line, and whether it waits for others.

Nothing of torch is wrapped: collectives of DDP, of FSDP and those that a script calls itself are all seen alike.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

_ACCELERATE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# Files whose frames say that the thread talks to others, or waits for them.
_TALKING = (
    _TORCH + "distributed" + os.sep,
    _ACCELERATE + "comm" + os.sep,
    os.path.join(_ACCELERATE, "state", "attempts.py"),
)
# DDP exchanges buffers from here, in code that is not Python's. It also calls the model, which may only be slow.
_DDP = os.path.join(_TORCH, "nn", "parallel", "distributed.py")
# In here DDP and FSDP exchange gradients, in code that is not Python's.
_BACKWARD = "_engine_run_backward"
# Calls that go straight from a line of the script into code that is not Python's, and wait for a collective there.
_WAITING_LINE = re.compile(r"\.(wait|synchronize|item|tolist|cpu|numpy)\(")
# Names of frames that say nothing to who reads them.
_PLAIN_NAMES = {"_wrapped_call_impl": "forward", "_call_impl": "forward", "__call__": "forward"}
_WRAPPERS = frozenset({"wrapper", "decorate_context", "inner", "_fn", "barrier_"})
_LONGEST_STACK = 200


@dataclass(frozen=True)
class Place:
    """Where a thread is. call: what the script has called there. line: of the script. waits: for other ranks."""

    call: str
    line: str
    waits: bool
    stack: str = ""


# Of each frame which instruction it is at: the same twice if the thread has not moved, or has come there again.
Signature = tuple[tuple[int, int], ...]


def signature(thread: int) -> Signature:
    """Tells one place from another, at the price of a walk over some tens of frames."""
    frames = _outwards(sys._current_frames().get(thread))
    return tuple((id(frame.f_code), frame.f_lasti) for frame in frames[:_LONGEST_STACK])


def place_of(thread: int, *, stack: bool = False) -> Place | None:
    """Where a thread is; None if it has ended. stack: with all of its lines."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    frames = _outwards(frame)
    own = next((index for index, each in enumerate(frames) if _is_of_script(each)), len(frames) - 1)
    line = f"{os.path.basename(frames[own].f_code.co_filename)}:{frames[own].f_lineno}"
    called = frames[:own]
    if called:
        waits = called[0].f_code.co_filename == _DDP or any(map(_talks, called))
    else:
        waits = _waiting_call(frames[own]) is not None
    text = "".join(traceback.format_stack(frame)) if stack else ""
    return Place(_name(called, frames[own]), line, waits, text)


def at_line(trace: TracebackType | None) -> str:
    """` (train.py:7)` for the innermost line of the script in a traceback; nothing where there is none."""
    found = ""
    while trace is not None:
        if _is_of_script(trace.tb_frame):
            found = f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def line_of_script() -> str:
    """The line of the script that led here."""
    frame = sys._getframe(1)
    while not _is_of_script(frame) and frame.f_back is not None:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _outwards(frame: FrameType | None) -> list[Any]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_of_script(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((_ACCELERATE, _TORCH, _STDLIB, "<frozen"))


def _talks(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TALKING) or frame.f_code.co_name == _BACKWARD


def _waiting_call(frame: FrameType) -> str | None:
    """The call in the line of a frame that may wait for a collective."""
    match = _WAITING_LINE.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    return None if match is None else match.group(1)


def _name(called: list[Any], script: FrameType) -> str:
    """What the line of the script has called, or else the function that the line is in."""
    for frame in reversed(called):
        name = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(_ACCELERATE + "data_loader" + os.sep):
            return "the next batch of a loader"
        if name in ("__init__", "__enter__", "__exit__"):  # a class says more
            name = type(frame.f_locals.get("self")).__name__
        if name not in _WRAPPERS and not frame.f_code.co_filename.startswith(_STDLIB):
            return _PLAIN_NAMES.get(name, name.strip("_"))
    return (None if called else _waiting_call(script)) or script.f_code.co_name
