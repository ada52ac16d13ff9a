"""What the machine with rank 0 says of its own address, before it waits for the others."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate.launch import elastic, waiting

UNKNOWN = "The address 'node-1' of the machine with rank 0 cannot be found"


def _listens(host: str) -> None:
    config = SimpleNamespace(
        rdzv_backend="static", min_nodes=2, max_nodes=2, rdzv_endpoint=f"{host}:0", rdzv_configs={"rank": 0}
    )
    with elastic._listening(config, True, 0):
        pass


def _no_such_name(*words: Any, **how: Any) -> Any:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_NAMED_WITHIN", 0.0)
    monkeypatch.setattr(waiting, "socket", SimpleNamespace(**{**vars(socket), "getaddrinfo": _no_such_name}))
    with pytest.raises(waiting.NobodyThere, match=UNKNOWN):
        _listens("node-1")


def test_a_name_that_a_cluster_learns_late(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [_no_such_name, lambda *words, **how: socket.getaddrinfo("127.0.0.1", 0, **how)]
    late = SimpleNamespace(**{**vars(socket), "getaddrinfo": lambda *words, **how: answers.pop(0)(*words, **how)})
    monkeypatch.setattr(waiting, "socket", late)
    monkeypatch.setattr(waiting, "_LOOK", 0.0)
    waiting.check_own("node-1", limit=60.0)
    assert answers == []
    assert capsys.readouterr().err.startswith("accelerate launch: the address 'node-1' cannot be found (Name or")


def test_an_address_of_another_machine_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    _listens("203.0.113.7")  # of the addresses for documents, which no machine has
    assert "accelerate launch: 203.0.113.7 is not an address of this machine" in capsys.readouterr().err
    for own in ("127.0.0.1", "localhost"):
        _listens(own)
    assert "is not an address" not in capsys.readouterr().err


def test_an_address_of_ipv6_may_have_brackets() -> None:
    with socket.socket(socket.AF_INET6) as main:
        try:
            main.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"this machine has no address of IPv6 ({error})")
        main.listen()
        config = SimpleNamespace(
            rdzv_backend="static",
            min_nodes=2,
            max_nodes=2,
            rdzv_endpoint=f"[::1]:{main.getsockname()[1]}",
            rdzv_configs={"rank": 1, "timeout": 0.0},
        )
        with elastic._listening(config, True, 1):
            pass
