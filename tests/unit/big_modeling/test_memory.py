from __future__ import annotations

import logging

import pytest

from accelerate.utils import get_balanced_memory, get_max_memory
from tests.unit.big_modeling.models import Net


def test_limits_are_read_and_put_in_order(caplog: pytest.LogCaptureFixture) -> None:
    given = {"disk": 7, "cpu": "1KB", 9: "2KiB", 8: 5}
    with caplog.at_level(logging.WARNING):
        found = get_max_memory(given)
    assert list(found.items()) == [(8, 5), (9, 2048), ("cpu", 1000), ("disk", 7)]
    assert given["cpu"] == 1000, "transformers goes on with what it gave"
    assert "max_memory names device 8" in caplog.text
    assert list(get_max_memory({"mps": 3, "cpu": 1})) == ["mps", "cpu"]


def test_devices_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="max_memory names the device 'cuda:0'"):
        get_max_memory({"cuda:0": 5})
    with pytest.raises(ValueError, match="as in '5GB'"):
        get_max_memory({0: "a lot"})


def test_what_is_free_now() -> None:
    found = get_max_memory()
    assert ("cpu" in found or "mps" in found) and all(limit > 0 for limit in found.values())


def test_balance() -> None:
    # 636 bytes with three blocks; the mean of the layers is 79, the biggest block 144.
    limits = {0: 10_000, 1: 10_000, 2: 10_000, "cpu": 5}
    share = 636 // 3
    assert get_balanced_memory(Net(), limits) == {0: share + 98, 1: share + 98, 2: 10_000, "cpu": 5}
    assert get_balanced_memory(Net(), limits, ["Block"])[0] == share + 180
    assert get_balanced_memory(Net(), limits, "Block")[0] == share + 180
    low = get_balanced_memory(Net(), limits, low_zero=True)
    assert low == {0: 0, 1: 636 // 2 + 98, 2: 10_000, "cpu": 5}
    assert get_balanced_memory(Net(), limits, dtype="float16")[0] < share
    assert get_balanced_memory(Net(), {0: 10_000, "cpu": 5}) == {0: 10_000, "cpu": 5}
    assert get_balanced_memory(Net(), {"cpu": 5}) == {"cpu": 5}
    assert get_balanced_memory(Net(), {0: 100, 1: 10_000})[0] == 100
    assert get_balanced_memory(Net(), {0: 0, 1: 10_000, "disk": 3}) == {0: 0, 1: 10_000, "disk": 3}
