"""How the list of a hang names a rank that waits for the first one."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate.diagnosis.place import place_of
from accelerate.state.processes import ProcessControl


class Second(ProcessControl):
    """The second of two ranks, on one machine."""

    process_index = local_process_index = 1
    num_processes = 2

    def __init__(self) -> None:
        self.meeting = threading.Barrier(2)

    @property
    def _communicator(self) -> Any:
        return SimpleNamespace(barrier=self.meeting.wait)


@pytest.mark.parametrize("name", ["main_process_first", "local_main_process_first"])
def test_who_waits_for_the_first_is_shown_by_the_name_that_the_script_has_called(name: str) -> None:
    second, seen, waiting = Second(), [], threading.get_ident()

    def look() -> None:
        while not second.meeting.n_waiting:
            time.sleep(0.001)
        seen.append(place_of(waiting))
        second.meeting.wait()

    looking = threading.Thread(target=look)
    looking.start()
    with getattr(second, name)():
        pass
    looking.join()
    assert [place.call for place in seen if place is not None] == [name]
