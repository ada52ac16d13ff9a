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
_hears_errors = False
# Takes back what was put in the place of others while any is open.
_undo: list[Callable[[], None]] = []


def listen(recorder: Recorder) -> None:
    """Tell this recorder what is heard from now on."""
    global _hears_errors
    _open.append(recorder)
    if not _hears_errors:
        _hears_errors = True
        sys.excepthook = _errors(sys.excepthook)
    if not _undo:
        _undo.extend((_listen_to_warnings(), _listen_to_logs()))


def stop(recorder: Recorder) -> None:
    """Training has ended: only the error that may be on its way is of interest now."""
    if recorder in _open:
        _open.remove(recorder)
    if (error := sys.exc_info()[1]) is not None:
        _ended.append((recorder, error))
    while not _open and _undo:
        _undo.pop()()


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


def _listen_to_warnings() -> Callable[[], None]:
    previous = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
        for recorder in _open:
            recorder.warning(f"{category.__name__}: {message}")
        previous(message, category, *rest, **more)

    def undo() -> None:
        if warnings.showwarning is show:
            warnings.showwarning = previous

    warnings.showwarning = show
    return undo


def _listen_to_logs() -> Callable[[], None]:
    # A handler would hear them, too, but then Python would no longer show what nobody else handles.
    previous = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = previous(*args, **kwargs)
        if record.levelno >= logging.WARNING:
            for recorder in _open:
                recorder.warning(f"{record.name}: {_message(record)}")
        return record

    def undo() -> None:
        if logging.getLogRecordFactory() is make:
            logging.setLogRecordFactory(previous)

    logging.setLogRecordFactory(make)
    return undo


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # arguments that do not fit: who shows it says so
        return str(record.msg)
