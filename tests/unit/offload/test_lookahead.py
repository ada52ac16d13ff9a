"""Whole models, with a copier that looks ahead as that of a GPU does: what it brings in are copies."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import cpu_offload
from accelerate.hooks import align
from accelerate.hooks.align import align_hooks
from accelerate.io.stored_tensors import FileRange
from accelerate.offload import streaming
from accelerate.offload.slot import Slot

X = torch.ones(1, 4)


class Copies:
    """Copies are made at once, and handed out later."""

    lookahead = 2

    def __init__(self) -> None:
        self.started = 0

    def prepare(self, slots: list[Slot]) -> None:
        pass

    def start(self, slots: list[Slot]) -> Done:
        self.started += 1
        sources = [slot.take() for slot in slots]
        return Done([_copied(source) for source in sources])


def _copied(source: torch.Tensor | FileRange) -> torch.Tensor:
    return source.mapped() if isinstance(source, FileRange) else source.detach().clone()


class Done:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> list[torch.Tensor]:
        return self.tensors

    def cancel(self) -> None:
        self.tensors = []


class Coder(nn.Module):
    """Called by its forward, and by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.enc = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.dec = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.first = nn.Linear(4, 4)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.dec(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dec(self.enc(x * self.scale))


def coder() -> Coder:
    torch.manual_seed(0)
    return Coder()


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Copies:
    made = Copies()
    monkeypatch.setattr(streaming, "SMALL", 0)
    monkeypatch.setattr(align, "copier_for", lambda device: made)
    return made


def there(model: nn.Module) -> tuple[int, int]:
    """How many blocks are in use, and how many are waiting."""
    found = {hook._streamer for part in model.modules() for hook in align_hooks(part) if hook._streamer is not None}
    (streamer,) = found
    return len(streamer._in_use), len(streamer._coming)


def is_clean(model: nn.Module) -> bool:
    return there(model) == (0, 0) and all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("way", ["offloaded", "dispatched"])
def test_nothing_stays_after_any_call(way: str, copier: Copies) -> None:
    if way == "offloaded":
        model: Any = cpu_offload(coder(), "cpu")
    else:
        model = coder()
        weights = dict(model.state_dict())
        align_model(model, weights)
    reference = coder()
    most = []
    for part in model.dec:
        part.register_forward_pre_hook(lambda module, args: most.append(there(model)[1]))
    for _ in range(4):
        assert torch.equal(model.decode(X), reference.decode(X))
        assert is_clean(model)
        assert torch.equal(model(X), reference(X))
        assert is_clean(model)
        assert torch.equal(model.enc[2](X), reference.enc[2](X))
        assert is_clean(model)
    assert max(most) == 2  # within a call it does look ahead


def align_model(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    from accelerate.hooks import attach_align_device_hook_on_blocks

    names = ["scale", "enc", "dec", "first"]
    attach_align_device_hook_on_blocks(
        model, dict.fromkeys(["", *names], "cpu"), dict.fromkeys(names, True), weights_map=weights
    )
    align.watch(model)


def test_part_of_a_model_looks_ahead(copier: Copies) -> None:
    model: Any = cpu_offload(coder(), "cpu")
    seen = []
    model.dec[1].register_forward_pre_hook(lambda module, args: seen.append(there(model)))
    for _ in range(3):
        model.decode(X)
    assert seen[-1][1] == 2


def test_the_members_of_a_list_look_ahead(copier: Copies) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model: Any = cpu_offload(Features(), "cpu")
    torch.manual_seed(0)
    reference = Features()
    seen = []
    model.blocks[1][0].register_forward_pre_hook(lambda module, args: seen.append(there(model)))
    for _ in range(3):
        assert torch.equal(model.features(X), reference.features(X))
        assert is_clean(model)
    assert seen[-1][1] == 2


def _direct(model: Any) -> None:
    model.dec[1](torch.ones(1, 3))


def _within(model: Any) -> None:
    model(torch.ones(1, 3))


def _in_a_part(model: Any) -> None:
    model.dec(torch.ones(1, 3))


@pytest.mark.parametrize("call", [_direct, _within, _in_a_part])
def test_nothing_stays_after_an_exception(call: Callable[[Any], None], copier: Copies) -> None:
    model: Any = cpu_offload(coder(), "cpu")
    reference = coder()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            call(model)
        assert is_clean(model)
        assert torch.equal(model(X), reference(X))
        assert is_clean(model)
    for changed in (model, reference):
        changed.dec[1].weight.data.zero_()
    assert torch.equal(model(X), reference(X))


def test_inputs_that_cannot_be_moved(copier: Copies) -> None:
    class Stubborn(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("stays")

    model: Any = cpu_offload(coder(), "cpu")
    with pytest.raises(ValueError, match="stays"):
        model(X.as_subclass(Stubborn))
    assert is_clean(model)


def test_a_write_is_seen_by_a_block_that_is_on_its_way(copier: Copies) -> None:
    class Writes(Coder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enc[0](x)
            with torch.no_grad():
                self.enc[1].weight.add_(1.0)  # type: ignore[union-attr]
            return self.enc[2](self.enc[1](x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = cpu_offload(Writes(), "cpu")
    torch.manual_seed(0)
    reference = Writes()
    for _ in range(4):
        assert torch.equal(model(X), reference(X))


def test_a_tensor_that_is_put_in_place_of_one_on_its_way_stays(copier: Copies) -> None:
    class Exchanges(Coder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enc[0](x)
            if self.scale[0] == 1:
                self.enc[1].weight = nn.Parameter(torch.zeros(4, 4))  # type: ignore[union-attr]
            return self.enc[2](self.enc[1](x))  # type: ignore[no-any-return]

    model: Any = cpu_offload(Exchanges(), "cpu")
    model.scale.data.zero_()
    for _ in range(3):
        model(X)
    model.scale.data.fill_(1.0)
    # What comes out of a layer without weights is its bias, for each row.
    assert torch.equal(model(X), model.enc[2](model.enc[1].bias.repeat(len(X), 1)))
    assert not model.enc[1].weight.is_meta


def test_copies_are_used_as_long_as_nothing_changes(copier: Copies) -> None:
    model = cpu_offload(coder(), "cpu")
    for _ in range(2):
        model(X)
    copier.started = 0
    model(X)
    assert copier.started == 9  # each block once


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("often_interrupted")
def test_threads(copier: Copies) -> None:
    model: Any = cpu_offload(coder(), "cpu")
    reference = coder()
    expected = {False: reference(X), True: reference.decode(X)}
    wrong: list[Any] = []

    def work(decode: bool) -> None:
        for _ in range(200):
            try:
                found = model.decode(X) if decode else model(X)
                if not torch.equal(found, expected[decode]):
                    wrong.append(found)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert is_clean(model)
