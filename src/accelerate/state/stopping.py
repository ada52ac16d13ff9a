"""All ranks stop at the same step after a signal to any of them.

Every rank counts the steps at which it asks whether to stop. On the way there is nothing else: no collective, and no
message. A thread of each rank waits for a key of the store. The rank that gets a signal tells all of these threads.
Each has its rank wait at the next step, and answers how many steps that rank has passed. The step after the largest
number is where all stop: nobody has passed it, and the ranks that are behind go on until they are there.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from accelerate.config.preemption import REGROUPING, STOP_SIGNALS, regrouping
from accelerate.per_rank import are_ranks_threads
from accelerate.torch_internals.process_groups import own_connection

if TYPE_CHECKING:
    from accelerate.state.partial import PartialState

# How long one who asks waits for the others' threads, which answer at once while they live.
_PATIENCE = timedelta(seconds=5)
# For connections, which many ranks may make at once.
_CONNECTING = timedelta(minutes=2)
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Stop:
    """When to stop, and why. step: the number of the step; never, if it is 0."""

    step: int
    reason: str


class Stopping:
    """Whether this rank is to stop. `now` is asked once for each step, on every rank."""

    def __init__(self, rank: int, store: Store | None) -> None:
        self.stop: Stop | None = None
        self.was_asked = False  # by a signal to this rank
        self._process = os.getpid()
        self._rank = rank
        self._store = store
        self.passed = 0  # at how many steps it was asked
        self._begun = False
        self._told = False
        self._decided = threading.Event()
        self._before = self._listen()
        self._threads: list[threading.Thread] = []
        if store is not None:
            self._start(self._wait_for_word, store)

    def begin(self) -> None:
        """Somebody is about to ask, after a step: a signal waits for that."""
        self._begun = True

    def now(self) -> bool:
        """Whether this is the step to stop at, or one after it."""
        self.passed += 1
        return self._told and self._is_due()

    def _is_due(self) -> bool:
        self._decided.wait()
        return self.stop is not None and 0 < self.stop.step <= self.passed

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="accelerate-stop", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask(self, number: int) -> None:
        """Have all ranks stop because of a signal. Returns at once."""
        again, self.was_asked = self.was_asked or self._told, True
        if again:  # some of the others may have ended by now
            return
        mark = regrouping()
        regroups = mark is not None and mark.exists()
        reason = REGROUPING if regroups else f"{signal.Signals(number).name} on rank {self._rank}"
        if self._store is None:
            self._told = True
            self._decide(Stop(self.passed + 1, reason))
        else:
            self._start(self._ask_all, self._store, reason, number)

    def _ask_all(self, store: Store, reason: str, number: int) -> None:
        try:
            if not store.is_first():
                return
            store.tell_all("asked")
            store.decide(Stop(max(store.answers()) + 1, reason))
        except (RuntimeError, OSError):
            # A rank is gone, or not there yet, and its launcher ends the others: nothing can be saved together.
            with suppress(RuntimeError, OSError):
                store.decide(Stop(0, reason))
            _end_by(number)

    def _wait_for_word(self, store: Store) -> None:
        try:
            if store.word() != "asked":
                return
            self._told = True  # first this: a step that is counted later waits
            store.answer(self.passed)
            self._decide(store.decision())
        except (RuntimeError, OSError):
            self._decide(Stop(0, "the ranks could not agree"))  # this one goes on, until it misses those that are gone

    def _decide(self, stop: Stop) -> None:
        self.stop = stop
        self._decided.set()

    def _listen(self) -> dict[int, Any]:
        """Take the signals; returns who had them. Only the main thread may."""
        before: dict[int, Any] = {}
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not None:  # None: C code has it, and would lose it
                with suppress(ValueError):
                    before[number] = signal.signal(number, self._on_signal)
        return before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = self._before.get(number)
        if not self.is_here() or not (self.passed or self._begun):  # a fork; or no step yet, so nothing to save
            signal.signal(number, handler if callable(handler) else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._ask(number)
        if callable(handler):
            handler(number, frame)

    def is_here(self) -> bool:
        """Whether this process is the rank, and no fork of it."""
        return os.getpid() == self._process

    def close(self, at_exit: bool) -> None:
        """The end of the program (at_exit), or of the group."""
        if not self.is_here():
            return
        stopped = at_exit and self.stop is not None and self.stop.step > 0
        for number, handler in self._before.items():
            with suppress(ValueError):
                if signal.getsignal(number) == self._on_signal:
                    # Who ends because of a signal is sent another one by launchers, and would not come to its end.
                    signal.signal(number, signal.SIG_IGN if stopped else handler)
        if self._store is not None:
            self._store.close()
        for thread in self._threads:
            thread.join(2 * _PATIENCE.total_seconds())


def _end_by(number: int) -> None:
    """End this process by a signal, as if nobody had listened to it."""
    # Python's own call is for the main thread alone.
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)


class Store:
    """What the ranks say to each other, in the store where they have met."""

    def __init__(self, waiting: Any, asking: Any, prefix: str, rank: int, size: int) -> None:
        # A connection that waits answers nothing else, so there is one for the thread that always does.
        self._waiting = waiting
        self._asking = asking
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._over = False

    def word(self) -> str:
        """What this rank is told, when it is told something."""
        key = f"{self._prefix}/word/{self._rank}"
        self._waiting.wait([key], _FOREVER)
        return str(self._waiting.get(key).decode())

    def close(self) -> None:
        """Nobody waits any longer."""
        self._over = True
        with suppress(RuntimeError, OSError):
            self._asking.set(f"{self._prefix}/word/{self._rank}", "end")

    def is_first(self) -> bool:
        return int(self._asking.add(f"{self._prefix}/asked", 1)) == 1

    def tell_all(self, word: str) -> None:
        for rank in range(self._size):
            self._asking.set(f"{self._prefix}/word/{rank}", word)

    def answer(self, passed: int) -> None:
        self._waiting.set(f"{self._prefix}/passed/{self._rank}", str(passed))

    def answers(self) -> list[int]:
        keys = [f"{self._prefix}/passed/{rank}" for rank in range(self._size)]
        self._asking.wait(keys, _PATIENCE)
        return [int(self._asking.get(key)) for key in keys]

    def decide(self, stop: Stop) -> None:
        self._asking.set(f"{self._prefix}/stop", json.dumps([stop.step, stop.reason]))

    def decision(self) -> Stop:
        for _ in range(2 * int(_PATIENCE.total_seconds())):
            with suppress(RuntimeError):
                self._waiting.wait([f"{self._prefix}/stop"], timedelta(seconds=1))
                return Stop(*json.loads(self._waiting.get(f"{self._prefix}/stop")))
            if self._over:
                break
        return Stop(0, "the ranks could not agree")


_current: Stopping | None = None
# With how many steps a rank begins that has never asked, while others have.
_missed = 0


def current(state: PartialState) -> Stopping:
    """Of this process; from the first call on it takes signals. Called by all ranks."""
    global _current
    if are_ranks_threads():
        raise RuntimeError(
            f"Rank {state.process_index} is a thread, and signals reach processes: leave `preemption` and "
            "`should_stop` out, or start a process for each rank."
        )
    if _current is None:
        _current = Stopping(state.process_index, _store(state))
        _current.passed = _missed
    return _current


def _store(state: PartialState) -> Store | None:
    if state.num_processes == 1:
        return None
    waiting, asking = own_connection(_CONNECTING), own_connection(_CONNECTING)
    if not hasattr(waiting, "port"):
        raise RuntimeError(
            f"Rank {state.process_index} cannot agree with the others on when to stop: the process group has no TCP "
            "store. Leave `init_method` out, or start the script with `accelerate launch` or torchrun."
        )
    prefix = f"accelerate/stop/{state._attempt()}"
    return Store(waiting, asking, prefix, state.process_index, state.num_processes)


def passed() -> int:
    """At how many steps this rank has asked whether to stop."""
    return _missed if _current is None else _current.passed


def catch_up(passed: int) -> None:
    """Called on all ranks with the largest number of any, where some may have left out a step."""
    global _missed
    _missed = passed
    if _current is not None:
        _current.passed = max(_current.passed, passed)


def close(at_exit: bool = False) -> None:
    """Signals are no longer taken."""
    global _current, _missed
    stopping, _current, _missed = _current, None, 0
    if stopping is not None:
        stopping.close(at_exit)


atexit.register(close, at_exit=True)
