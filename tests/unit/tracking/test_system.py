"""Samples of how busy the machine is."""

from __future__ import annotations

import pytest

from accelerate.tracking.system import GIB, Gauges


def test_what_is_found_out() -> None:
    gauges = Gauges(True, lambda: (GIB, 4 * GIB), "GPU-that-is-not-there")
    found = gauges()
    assert set(found) == {
        "process CPU, %",
        "process memory, GiB",
        "machine CPU, %",
        "machine memory, %",
        "GPU memory, GiB",
    }
    assert found["GPU memory, GiB"] == 3.0 and found["process memory, GiB"] > 0
    assert set(Gauges(False, None, None)()) == {"process CPU, %", "process memory, GiB"}


@pytest.mark.parametrize("error", [RuntimeError("no"), AttributeError("mem_get_info")])
def test_a_device_that_cannot_be_asked(error: Exception) -> None:
    def memory() -> tuple[int, int]:
        raise error

    assert "GPU memory, GiB" not in Gauges(False, memory, None)()
