"""Which of several failures was the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerate.launch.elastic import _when


def process(exitcode: int, noticed: int = 100, time: float | None = None) -> Any:
    extra = {} if time is None else {"extraInfo": {"time": time}}
    return SimpleNamespace(exitcode=exitcode, timestamp=noticed, error_file_data={"message": extra})


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (process(1, time=100.2), process(1, time=100.3)),
        (process(3, time=100.9), process(-15, noticed=100)),  # ended because of the first
        (process(-9, noticed=101), process(1, time=100.5)),  # failed because the first was gone
        (process(-11), process(-15)),
        (process(1, time=100.9), process(2, noticed=100)),  # noticed at some time of that second
        (process(1, time=100.5), process(-6, noticed=100)),  # a watchdog gave up
    ],
)
def test_order(first: Any, other: Any) -> None:
    assert min([other, first], key=_when) is first
