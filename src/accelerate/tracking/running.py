"""The trackers that an Accelerator has started on this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.errors import a_kind_of, warn
from accelerate.state import PartialState
from accelerate.text import did_you_mean
from accelerate.tracking.base import GeneralTracker
from accelerate.tracking.outbox import Outbox, time_limit


class RunningTrackers:
    """A list of trackers, and for each the outbox through which it is called."""

    def __init__(self) -> None:
        self.all: list[GeneralTracker] = []
        self._outboxes: dict[int, Outbox] = {}
        self._unable: set[tuple[str, str]] = set()

    def add(self, tracker: GeneralTracker) -> None:
        """Take in a tracker that has just been started."""
        self._outboxes[id(tracker)] = Outbox(tracker)
        self.all.append(tracker)

    def forget_ended(self) -> None:
        self.all = [tracker for tracker in self.all if not self._outbox(tracker).closed]
        # Only of those in the list: the outbox holds its tracker, so that no other can have its identity.
        self._outboxes = {id(tracker): self._outbox(tracker) for tracker in self.all}

    def send(self, method: str, own: dict[str, dict[str, Any]] | None, /, *args: Any, **kwargs: Any) -> None:
        """Have a method of each tracker called. own: by the name of a tracker, more arguments for it."""
        if own and self.all:
            self.say_misspelt("log_kwargs", own)
        for tracker in self.all:
            function = getattr(tracker, method, None)
            if function is not None:
                self._outbox(tracker).call(method, _call_with_own, function, tracker.name, own, *args, **kwargs)
            elif (tracker.name, method) not in self._unable:
                self._unable.add((tracker.name, method))
                warn(f"The tracker {tracker.name!r} has no `{method}`, so it is left out.")

    def say_misspelt(self, argument: str, own: Any) -> None:
        """Say once which names in such an argument are nearly those of trackers; others may be of one not in use."""
        from accelerate.tracking import known_trackers

        known = {*known_trackers(), *(tracker.name for tracker in self.all)}
        for name in own if isinstance(own, Mapping) else ():
            if name in known or (argument, name) in self._unable:
                continue
            self._unable.add((argument, name))
            near = did_you_mean(str(name), known)
            if near and PartialState().is_main_process:
                warn(f"`{argument}` has arguments for {name!r}{near}, which is no tracker: they have no effect.")

    def store(self, tracker: GeneralTracker, config: dict[str, Any]) -> None:
        """Have a tracker keep the settings of the run."""
        self._outbox(tracker).call("store_init_configuration", tracker.store_init_configuration, config)

    def note(self, kind: str, text: str) -> None:
        """Tell the trackers what happened to the run."""
        for tracker in self.all:
            # A script may have put anything into the list.
            if isinstance(tracker, GeneralTracker) and not self._outbox(tracker).closed:
                tracker._note(kind, text)

    def in_order(self, trackers: list[GeneralTracker]) -> None:
        """Wait until these trackers have got what was logged so far, so that direct calls come after it."""
        for tracker in trackers:
            self._outbox(tracker).catch_up()

    def end(self) -> None:
        """Finish all of them, within `time_limit()` seconds."""
        limit = time_limit()
        end = time.monotonic() + limit
        ending = [tracker for tracker in self.all if not self._outbox(tracker).closed]
        for tracker in ending:
            self._outbox(tracker).close()
        for tracker in ending:
            if not self._outbox(tracker).flush(end - time.monotonic()):
                warn(
                    f"The tracker {tracker.name!r} did not end within {limit:g} seconds, so some logged values may "
                    "be missing: set ACCELERATE_TRACKER_TIMEOUT to more seconds if it needs them."
                )

    def _outbox(self, tracker: GeneralTracker) -> Outbox:
        # Made here for a tracker that a script has put into the list by itself.
        if id(tracker) not in self._outboxes:
            self._outboxes[id(tracker)] = Outbox(tracker)
        return self._outboxes[id(tracker)]

    def __getstate__(self) -> list[GeneralTracker]:
        """Another process gets the trackers, as far as their libraries let them go, and makes outboxes of its own."""
        running = [tracker for tracker in self.all if not self._outbox(tracker).closed]
        self.in_order(running)
        return running

    def __setstate__(self, running: list[GeneralTracker]) -> None:
        RunningTrackers.__init__(self)
        self.all = running


def _call_with_own(
    function: Callable[..., Any], name: str, own: dict[str, dict[str, Any]] | None, /, *args: Any, **kwargs: Any
) -> None:
    try:
        function(*args, **{**kwargs, **(own or {}).get(name, {})})
    except (AttributeError, TypeError) as error:
        # Not before the call: a tracker of one's own may take anything.
        if function.__name__ != "log" or isinstance(args[0], Mapping):
            raise
        raise TypeError(
            f'it was given {a_kind_of(args[0])}: pass a dict, as in `accelerator.log({{"loss": loss}})`.'
        ) from error
