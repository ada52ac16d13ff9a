"""By which address the other machines are told to find this one."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from accelerate.launch.rendezvous import _own_address


def test_a_name_that_only_this_machine_knows_as_its_own_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(host: str, port: int, **how: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", port))]

    assert _own_address("127.0.0.1", 1) == _own_address("localhost", 1) == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert _own_address("first-machine", 1) is None
