"""What a program says by itself while it is recorded: warnings, and the error that ends it.

Each is heard where Python lets anybody listen, and goes on to whoever listened before.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from accelerate.tracking.recorder import Recorder

# Those that are open, and those that ended while an error was on its way, with that error.
_open: list[Recorder] = []
_ended: list[tuple[Recorder, BaseException]] = []
_listening = False


def listen(recorder: Recorder) -> None:
    """Tell this recorder what is heard from now on."""
    global _listening
    _open.append(recorder)
    if not _listening:
        _listening = True
        sys.excepthook = _errors(sys.excepthook)
        warnings.showwarning = _warnings(warnings.showwarning)
        logging.setLogRecordFactory(_records(logging.getLogRecordFactory()))


def stop(recorder: Recorder) -> None:
    """Training has ended: only the error that may be on its way is of interest now."""
    if recorder in _open:
        _open.remove(recorder)
    if (error := sys.exc_info()[1]) is not None:
        _ended.append((recorder, error))


def exits(code: Any) -> None:
    """The program ends with a code that is no success: called by what runs the script."""
    for recorder in list(_open):
        recorder.end("died", "interrupted" if code == 130 else f"the script ended with {code!r}")


def sentence(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _errors(previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for recorder in list(_open):
            recorder.end("died", sentence(error))
        for recorder, own in _ended:
            if own is error:
                recorder.end("died", sentence(error))
        previous(kind, error, trace)

    return hook


def _warnings(previous: Callable[..., Any]) -> Callable[..., Any]:
    def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
        for recorder in _open:
            recorder.warning(f"{category.__name__}: {message}")
        previous(message, category, *rest, **more)

    return show


def _records(previous: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    # A handler would be heard, too, but then Python would no longer show what nobody else handles.
    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = previous(*args, **kwargs)
        if record.levelno >= logging.WARNING and _open:
            for recorder in _open:
                recorder.warning(f"{record.name}: {record.getMessage()}")
        return record

    return make
