"""What ranks tell each other after an attempt: whether they can wait for it, and whether they are at one place."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accelerate.diagnosis.place import place_of
from accelerate.state import attempts
from accelerate.state.attempts import Report


def exchange_over(store: Any) -> attempts._Exchange:
    return attempts._Exchange(store, 0, 2, "attempt", "train")


def test_a_store_that_is_gone_is_no_timeout(tmp_path: Path) -> None:
    server: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client: Any = dist.TCPStore("127.0.0.1", server.port, None, False)
    exchange = exchange_over(client)
    assert not exchange._wait(["nobody"], 0.1)
    assert not exchange_over(dist.FileStore(str(tmp_path / "store"), -1))._wait(["nobody"], 0.1)
    server.set("there", "1")
    assert exchange._wait(["there"], None)
    del server
    with pytest.raises(RuntimeError):
        exchange._wait(["nobody"], None)


def test_a_wait_is_seen_by_the_watch() -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client: Any = dist.TCPStore("127.0.0.1", store.port, None, False)
    asked = threading.Event()

    class Waited:
        """Tells that it is waited on."""

        def check(self, keys: list[str]) -> bool:
            found = bool(client.check(keys))
            asked.set()
            return found

    waiter = threading.Thread(target=exchange_over(Waited())._wait, args=(["word"], None))
    waiter.start()
    assert asked.wait(60)
    place = place_of(waiter.ident or 0)
    store.set("word", "go")
    waiter.join()
    assert place is not None and place.waits


def test_ranks_are_apart_if_they_have_begun_different_collectives() -> None:
    assert not attempts._are_apart([Report(True, 1, begun={"0": 5}), Report(False, 1, begun={"0": 5, "mine": 2})])
    assert attempts._are_apart([Report(True, 1, begun={"0": 5}), Report(True, 1, begun={"0": 4})])


def test_an_error_is_not_held_back_by_ranks_that_never_report(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(attempts._Exchange, "_can_meet_again", lambda self: True)
    monkeypatch.setenv("ACCELERATE_HANG_TIMEOUT", "0.1")
    failed = Report(False, 8, error="KeyError: 'lost'")
    with pytest.raises(attempts.OthersWait) as caught:
        exchange_over(store).through_store(failed)
    assert caught.value.reports == {0: failed}
