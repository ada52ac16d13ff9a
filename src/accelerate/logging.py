"""Loggers that know how many processes there are."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import MutableMapping
from typing import Any


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger that logs on the main process only, unless told otherwise.

    Each call takes two more arguments: `main_process_only=False` logs on every rank, and `in_order=True` then makes the
    ranks take turns.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message, on the ranks that should.

        Args:
            level: the level of the message.
            msg: the message.
            args: its arguments.
            kwargs: those of `logging.Logger.log`, and `main_process_only` and `in_order`.
        """
        from accelerate.state import PartialState

        if not PartialState._shared_state:
            raise RuntimeError("Make a `PartialState()` or an `Accelerator()` before you use this logger.")
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        # 2 is the caller, since 1 would be a line of this file. Adapters around this one count from here, too.
        kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2)
        message, options = self.process(msg, kwargs)
        state = PartialState()
        if main_process_only or not in_order:
            if state.is_main_process or not main_process_only:
                self.logger.log(level, message, *args, **options)
            return
        for rank in range(state.num_processes):
            if rank == state.process_index:
                self.logger.log(level, message, *args, **options)
            state.wait_for_everyone()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank in front of a message.

        Args:
            msg: the message.
            kwargs: the keyword arguments of the call.

        Returns:
            Both, as they are logged.
        """
        from accelerate.state import PartialState

        msg, kwargs = super().process(msg, kwargs)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    @functools.lru_cache(None)  # noqa: B019  (loggers live as long as the program)
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, unless exactly this warning was given before.

        Args:
            *args: positional arguments of `warning`.
            **kwargs: keyword arguments of `warning`.
        """
        self.warning(*args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 2) + 1})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that knows about ranks.

    Args:
        name: the name of the logger.
        log_level: its level. By default that of `ACCELERATE_LOG_LEVEL`, or unchanged.
    """
    logger = logging.getLogger(name)
    level = os.environ.get("ACCELERATE_LOG_LEVEL") if log_level is None else log_level
    if level is not None:
        try:
            logger.setLevel(level.upper())
        except ValueError:
            name = "ACCELERATE_LOG_LEVEL" if log_level is None else "log_level"
            raise ValueError(f"{name} is {level!r}: choose one of DEBUG, INFO, WARNING, ERROR, CRITICAL.") from None
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
