"""Connections to stores."""

from __future__ import annotations

from datetime import timedelta

import pytest

from accelerate.machine import get_free_port
from accelerate.torch_internals.process_groups import connection_to


def test_a_store_that_is_gone_is_missed_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError):
        connection_to("127.0.0.1", get_free_port(), timedelta(seconds=2))
    assert capfd.readouterr() == ("", "")
