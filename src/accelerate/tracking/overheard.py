"""What a program says by itself while it is recorded: warnings, and the error that ends it.

Each is heard where Python lets anybody listen, and goes on to whoever listened before.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from accelerate.config.preemption import PREEMPTED
from accelerate.tracking.recorder import Recorder

# Those that are open.
_open: list[Recorder] = []
# Under this name an error knows those that ended while it was on its way. (Here it would live, with its traceback.)
_ENDED = "_accelerate_recorders"
_hears_errors = False
# Takes back what was put in the place of others while any is open.
_undo: list[Callable[[], None]] = []


class _Ended(list[Recorder]):
    """They belong to this process: an error that is sent to another one leaves them here."""

    def __reduce__(self) -> tuple[type[list[Any]], tuple[()]]:
        return list, ()


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
        error.__dict__.setdefault(_ENDED, _Ended()).append(recorder)
    while not _open and _undo:
        _undo.pop()()


def exits(code: Any) -> None:
    """The program ends with a code that is no success: called by what runs the script."""
    for recorder in list(_open):
        if code == PREEMPTED:
            recorder.end("ended", "preempted, and saved")
            continue
        recorder.end("died", "interrupted" if code == 130 else f"the script ended with {code!r}")


def sentence(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _errors(previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C: whoever gives it waits no longer
            for recorder in [*_open, *error.__dict__.get(_ENDED, ())]:
                recorder.end("died", sentence(error))
        previous(kind, error, trace)

    return hook


def _tell(text: str) -> None:
    for recorder in list(_open):
        recorder.warning(text)


def _listen_to_warnings() -> Callable[[], None]:
    previous = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
        with suppress(Exception):  # of a message that cannot be shown: what was there before may know better
            _tell(f"{category.__name__}: {message}")
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
        # A record that comes from elsewhere is made empty, and has no level yet.
        if record.levelno is not None and record.levelno >= logging.WARNING:
            with suppress(Exception):
                _tell(f"{record.name}: {_message(record)}")
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
