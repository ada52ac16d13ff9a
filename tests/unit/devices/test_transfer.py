"""How batches get to a device, where the device that is not here is played by the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.devices.transfer import OverlappedTransfer

CPU = torch.device("cpu")


class Asked(torch.Tensor):
    """A tensor that counts how often it is asked whether it is pinned, and says what it was told to."""

    questions = 0
    answer = False

    def is_pinned(self, device: Any = None) -> bool:
        type(self).questions += 1
        return self.answer


class PinnedTensor(Asked):
    answer = True


class Stream:
    """Only notes what is asked of it: on a CPU every copy is done when it returns."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def wait_stream(self, other: Any) -> None:
        self.notes.append("waits for the loop")

    def record_event(self) -> Any:
        self.notes.append("arrived")
        return Event()


class Event:
    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


def batches(kind: type[Asked]) -> list[dict[str, Any]]:
    kind.questions = 0
    return [{"x": torch.full((2,), float(i)).as_subclass(kind), "name": str(i)} for i in range(4)]


@pytest.mark.parametrize("kind", [Asked, PinnedTensor])
def test_the_driver_is_asked_about_the_first_batch_alone(kind: type[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu.Stream, "wait_event", lambda self, event: None, raising=False)
    stream = Stream()
    transfer = OverlappedTransfer(CPU, False, stream)
    given = batches(kind)
    found = []
    upcoming = transfer.start(given[0])
    for following in [*given[1:], None]:
        transfer.wait()
        current, upcoming = upcoming, None if following is None else transfer.start(following)
        found.append(transfer.finish(current))
    assert [(float(batch["x"][0]), batch["name"]) for batch in found] == [(float(i), str(i)) for i in range(4)]
    assert kind.questions == 1
    assert stream.notes.count("arrived") == (4 if kind is PinnedTensor else 0)


@pytest.mark.parametrize(
    ("given", "asked_for", "waits_no_longer_than_the_source"),
    [
        ({"x": torch.zeros(2)}, False, True),  # pageable: it has been read when the copy returns
        ({"x": torch.zeros(2).as_subclass(PinnedTensor), "y": torch.zeros(2)}, False, False),
        ({"x": torch.zeros(2).as_subclass(PinnedTensor), "y": torch.zeros(2)}, True, True),
    ],
)
def test_a_batch_that_is_not_all_pinned_is_copied_when_the_loop_asks_for_it(
    given: dict[str, torch.Tensor], asked_for: bool, waits_no_longer_than_the_source: bool
) -> None:
    transfer = OverlappedTransfer(CPU, asked_for, Stream())
    assert transfer.start(given) is given
    assert transfer.non_blocking is waits_no_longer_than_the_source
    assert set(transfer.finish(given)) == set(given)


def test_a_first_batch_without_tensors_does_not_confuse_the_next() -> None:
    transfer = OverlappedTransfer(CPU, False, Stream())
    words = transfer.start(["a", "b"])
    pinned = transfer.start({"x": torch.ones(1).as_subclass(PinnedTensor)})
    assert transfer.finish(words) == ["a", "b"]
    assert float(transfer.finish(pinned)["x"]) == 1.0
