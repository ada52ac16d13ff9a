"""Batches on their way to a GPU: see checks.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tests.gpu.checks import check, reset

COUNT = 40


class Numbered(Dataset[Any]):
    """Batches of their own number. reuse: all in one memory, pinned or not."""

    def __init__(self, elements: int, reuse: bool = False, pinned: bool = False) -> None:
        self.elements = elements
        self.memory = torch.empty(elements, pin_memory=pinned) if reuse else None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if self.memory is not None:
            return self.memory.fill_(index)
        return torch.full((self.elements,), float(index))


def _ranges(loader: Any) -> list[tuple[float, float]]:
    """The least and the greatest value of each batch, on a GPU that is behind the host."""
    weight = torch.randn(2048, 2048, device="cuda")
    results = []
    for batch in loader:
        h = weight
        for _ in range(4):
            h = torch.tanh(h @ weight)
        results.append((batch.min() + h.sum() * 0, batch.max() + h.sum() * 0))
        # Memory that the loop gives back may be taken by the next copy: never while it is in use.
        del batch
        torch.empty(3_000_000, device="cuda").fill_(-1)
    return [(low.item(), high.item()) for low, high in results]


@check
def copies_behind_the_compute_are_right() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    expected = [(float(i), float(i)) for i in range(COUNT)]
    for pins, dispatch, elements in product((False, True), (False, True), (1000, 4_000_000, 12_000_000)):
        reset()
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        loader = accelerator.prepare(DataLoader(Numbered(elements), batch_size=None, pin_memory=pins))
        for _ in range(2):
            assert _ranges(loader) == expected, (pins, dispatch, elements)


@check
def memory_that_a_dataset_uses_again_is_read_in_time() -> None:
    from accelerate import Accelerator

    expected = [(float(i), float(i)) for i in range(COUNT)]
    for pinned, elements in product((False, True), (1000, 4_000_000)):
        reset()
        data = Numbered(elements, reuse=True, pinned=pinned)
        assert _ranges(Accelerator().prepare(DataLoader(data, batch_size=None))) == expected, (pinned, elements)


def _many(index: int) -> Any:
    made = {i: torch.full((i % 50 + 1, 17), index + i, dtype=(torch.float32, torch.int64)[i % 2]) for i in range(2000)}
    return {"small": made, "large": torch.full((500_000,), float(index)), "none": torch.empty(0), "text": str(index)}


def _alike(index: int) -> Any:
    rows = [torch.full((3, 700), index + i, dtype=torch.bfloat16) for i in range(3000)]
    return {"rows": rows, "flags": {i: torch.arange(9) % (i + 2) == index for i in range(300)}}


def _mixed(index: int) -> Any:
    x = torch.arange(600_000.0).view(2, 3, 1000, 100) + index
    return [x.to(memory_format=torch.channels_last), x.transpose(1, 2), x[..., ::3], x[:1].expand(4, -1, -1, -1)]


class Made(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@check
def every_kind_of_batch_arrives_as_it_was() -> None:
    from accelerate import Accelerator
    from accelerate.comm.tree import leaves
    from accelerate.utils import DataLoaderConfiguration

    for make, dispatch, pins in product((_many, _alike, _mixed), (False, True), (False, True)):
        reset()
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        loader = accelerator.prepare(DataLoader(Made(make), batch_size=None, pin_memory=pins))
        kept = list(loader)  # at once: none may be overwritten
        assert len(kept) == 12
        for index, batch in enumerate(kept):
            for found, expected in zip(leaves(batch), leaves(make(index)), strict=True):
                assert found.is_cuda and found.dtype == expected.dtype, (make, dispatch, pins)
                assert found.stride() == torch.empty_like(expected).stride(), (make, dispatch, pins)
                assert torch.equal(found.cpu(), expected), (make, dispatch, pins, index)


@check
def a_loop_that_breaks_off_leaves_nothing_behind() -> None:
    from accelerate import Accelerator

    loader = Accelerator().prepare(DataLoader(Numbered(4_000_000), batch_size=None))
    for stop in range(10):
        for number, batch in enumerate(loader):
            kept = batch
            if number == stop:
                break
        other = torch.full((4_000_000,), -1.0, device="cuda")  # memory of the batch that nobody wants any more
        assert kept.unique().tolist() == [float(stop)] and other.unique().tolist() == [-1.0]
