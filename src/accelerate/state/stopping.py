"""All ranks stop at the same step after a signal to any of them.

Every rank counts the steps at which it asks whether to stop. On the way there is nothing else: no collective, and no
message. A thread of each rank waits for a key of the store. The rank that gets a signal tells all of these threads.
Each has its rank wait at the next step, and answers how many steps that rank has passed. The step after the largest
number is where all stop: nobody has passed it, and the ranks that are behind go on until they are there.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from accelerate.config.preemption import STOP_SIGNALS
from accelerate.torch_internals.process_groups import own_connection

if TYPE_CHECKING:
    from accelerate.state.partial import PartialState

# How long one who asks waits for the others' threads, which answer at once while they live.
_PATIENCE = timedelta(seconds=30)
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
        self._process = os.getpid()
        self._rank = rank
        self._store = store
        self._passed = 0
        self._told = False
        self._decided = threading.Event()
        self._before = self._listen()
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(target=self._wait_for_word, args=(store,), name="accelerate-stop")
            self._thread.daemon = True
            self._thread.start()

    def now(self) -> bool:
        """Whether this is the step to stop at, or one after it."""
        self._passed += 1
        return self._told and self._is_due()

    def _is_due(self) -> bool:
        self._decided.wait()
        return self.stop is not None and 0 < self.stop.step <= self._passed

    def ask(self, reason: str) -> None:
        """Have all ranks stop. Returns at once; called by signal handlers, too."""
        if self._store is None:
            self._told = True
            self._decide(Stop(self._passed + 1, reason))
        else:
            threading.Thread(target=self._ask_all, args=(self._store, reason), daemon=True).start()

    def _ask_all(self, store: Store, reason: str) -> None:
        with suppress(RuntimeError, OSError):  # the others are gone: the run is about to fail by itself
            if not store.is_first():
                return
            store.tell_all("asked")
            try:
                passed = store.answers()
                stop = Stop(max(passed) + 1, reason)
            except (RuntimeError, OSError) as error:
                stop = Stop(0, f"a rank gave no answer ({error})")
            store.decide(stop)

    def _wait_for_word(self, store: Store) -> None:
        try:
            if store.word() != "asked":
                return
            self._told = True  # first this: a step that is counted later waits
            store.answer(self._passed)
            self._decide(store.decision())
        except (RuntimeError, OSError):
            self._decide(Stop(0, "the ranks could not agree"))

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
        if not self.is_here():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.ask(f"{signal.Signals(number).name} on rank {self._rank}")
        if callable(handler := self._before.get(number)):
            handler(number, frame)

    def is_here(self) -> bool:
        """Whether this process is the rank, and no fork of it."""
        return os.getpid() == self._process

    def close(self) -> None:
        """The end of the program, or of the group."""
        for number, handler in self._before.items():
            with suppress(ValueError):
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
        if self._thread is not None and self._store is not None:
            with suppress(RuntimeError, OSError):
                self._store.tell_own_thread()
            self._thread.join(_PATIENCE.total_seconds())


class Store:
    """What the ranks say to each other, in the store where they have met."""

    def __init__(self, waiting: Any, talking: Any, prefix: str, rank: int, size: int) -> None:
        # A connection that waits answers nothing else, so there are two.
        self._waiting = waiting
        self._talking = talking
        self._prefix = prefix
        self._rank = rank
        self._size = size

    def word(self) -> str:
        """What this rank is told, when it is told something."""
        key = f"{self._prefix}/word/{self._rank}"
        self._waiting.wait([key], _FOREVER)
        return str(self._waiting.get(key).decode())

    def tell_own_thread(self) -> None:
        self._talking.set(f"{self._prefix}/word/{self._rank}", "end")

    def is_first(self) -> bool:
        return int(self._talking.add(f"{self._prefix}/asked", 1)) == 1

    def tell_all(self, word: str) -> None:
        for rank in range(self._size):
            self._talking.set(f"{self._prefix}/word/{rank}", word)

    def answer(self, passed: int) -> None:
        self._waiting.set(f"{self._prefix}/passed/{self._rank}", str(passed))

    def answers(self) -> list[int]:
        keys = [f"{self._prefix}/passed/{rank}" for rank in range(self._size)]
        self._talking.wait(keys, _PATIENCE)
        return [int(self._talking.get(key)) for key in keys]

    def decide(self, stop: Stop) -> None:
        self._talking.set(f"{self._prefix}/stop", json.dumps([stop.step, stop.reason]))

    def decision(self) -> Stop:
        self._waiting.wait([f"{self._prefix}/stop"], 2 * _PATIENCE)
        return Stop(*json.loads(self._waiting.get(f"{self._prefix}/stop")))


_current: Stopping | None = None


def current(state: PartialState) -> Stopping:
    """Of this process; from the first call on it takes signals. Called by all ranks."""
    global _current
    if _current is None:
        _current = Stopping(state.process_index, _store(state))
    return _current


def _store(state: PartialState) -> Store | None:
    if state.num_processes == 1:
        return None
    waiting, talking = own_connection(_PATIENCE), own_connection(_PATIENCE)
    if not hasattr(waiting, "port"):
        raise RuntimeError(
            f"Rank {state.process_index} cannot agree with the others on when to stop: the process group has no TCP "
            "store. Leave `init_method` out, or start the script with `accelerate launch` or torchrun."
        )
    prefix = f"accelerate/stop/{state._attempt()}"
    return Store(waiting, talking, prefix, state.process_index, state.num_processes)


def close() -> None:
    """Signals are no longer taken."""
    global _current
    stopping, _current = _current, None
    if stopping is not None:
        stopping.close()


@atexit.register
def _at_exit() -> None:
    if _current is not None and _current.is_here():
        close()
