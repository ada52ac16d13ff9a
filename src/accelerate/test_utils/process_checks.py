"""Checks of single methods, for `accelerate test`: who runs what, who gets which part, which samples a loader gives.

Each compares after it has talked to the other processes, or what is the same on all of them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate.accelerator import Accelerator
from accelerate.comm import ops
from accelerate.config.data import DataLoaderConfiguration
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from accelerate.random import set_seed, synchronize_rng_states
from accelerate.state import AcceleratorState
from accelerate.test_utils.cases import are_the_same_tensors, assert_exception, capture_call_output
from accelerate.test_utils.checks import expect, expect_equal, needs, shared_folder
from accelerate.test_utils.training import RegressionDataset, RegressionModel


def print_main(state: Any) -> None:
    """For the main process."""
    print(f"{state.process_index} is the main process")


def print_local_main(state: Any) -> None:
    """For the main process of a machine."""
    print(f"{state.local_process_index} is the main process here")


def print_last(state: Any) -> None:
    """For the last process."""
    print(f"{state.process_index} is the last process")


def print_on(state: Any, process_idx: int) -> None:
    """For one process."""
    print(f"{state.process_index} is process {process_idx}")


def init_state_check() -> None:
    """The state can be made again, and is the same."""
    expect_equal(repr(AcceleratorState()), repr(AcceleratorState()), "the state")


def process_execution_check() -> None:
    """The main process goes first, and the decorators run functions on the processes that they name."""
    accelerator = Accelerator()
    state, rank, size = accelerator.state, accelerator.process_index, accelerator.num_processes
    with shared_folder() as folder:
        order = folder / "order"
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                time.sleep(0.1)  # the others would overtake it, if they could
            with order.open("a") as file:
                file.write(f"{rank}\n")
        accelerator.wait_for_everyone()
        ranks = [int(line) for line in order.read_text().split()]
    expect(ranks[0] == 0 and sorted(ranks) == list(range(size)), f"the processes came in the order {ranks}")
    cases = [
        (accelerator.on_main_process(print_main), rank == 0),
        (accelerator.on_local_main_process(print_local_main), accelerator.local_process_index == 0),
        (accelerator.on_last_process(print_last), rank == size - 1),
    ]
    for chosen in range(size):
        on: Any = accelerator.on_process(print_on, process_index=chosen)
        cases.append((functools.partial(on, process_idx=chosen), rank == chosen))
    for function, runs in cases:
        expect_equal(bool(capture_call_output(function, state)), runs, f"{function} runs on {rank}")


def _split(data: Any, items: list[Any], even: bool) -> None:
    """The parts are those of all processes, in order; their sizes differ by one at most, or not at all if padded."""
    state = AcceleratorState()
    with state.split_between_processes(data, apply_padding=even) as part:
        mine = [item.tolist() if isinstance(item, torch.Tensor) else item for item in part]
    sizes = ops.gather_object([len(mine)])
    share, rest = divmod(len(items), state.num_processes)
    wanted = [share + (rank < rest) for rank in range(state.num_processes)]
    if even:
        wanted = [math.ceil(len(items) / state.num_processes)] * state.num_processes
    expect_equal(sizes, wanted, f"{len(items)} items: the sizes of the parts")
    everything = ops.gather_object(mine)
    expect_equal(everything[: len(items)], items, "the parts together")


def _lengths() -> tuple[int, int]:
    size = AcceleratorState().num_processes
    return 2 * size, 2 * size - 1


def test_split_between_processes_list() -> None:
    """A list is split, as it is or with padding."""
    for length in _lengths():
        for even in (False, True):
            _split(list(range(length)), list(range(length)), even)


def test_split_between_processes_nested_dict() -> None:
    """All values of a dict are split alike: lists, and tensors."""
    state = AcceleratorState()
    length = 4 * state.num_processes
    numbers, names = list(range(length)), [f"name {number}" for number in range(length)]
    with state.split_between_processes({"a": numbers, "b": names, "c": torch.tensor(numbers)}) as part:
        mine = slice(4 * state.process_index, 4 * state.process_index + 4)
        expect_equal(part["a"], numbers[mine], "a list of numbers")
        expect_equal(part["b"], names[mine], "a list of texts")
        expect_equal(part["c"], torch.tensor(numbers)[mine], "a tensor")


def test_split_between_processes_tensor() -> None:
    """A tensor is split by rows."""
    state = AcceleratorState()
    for length in _lengths():
        rows = [[number, number + 1] for number in range(length)]
        for even in (False, True):
            _split(torch.tensor(rows, device=state.device), rows, even)


def test_split_between_processes_evenly() -> None:
    """The first processes have what is left over."""
    _split(list(range(17)), list(range(17)), even=False)


def test_split_between_processes_dataset(datasets_Dataset: Any) -> None:
    """A dataset of the `datasets` library is split as a list is."""
    for length in _lengths():
        rows = [{"k": number} for number in range(length)]
        for even in (False, True):
            _split(datasets_Dataset.from_list(rows), rows, even)


def test_trigger() -> None:
    """A flag that one process raises is seen by all, once."""
    accelerator = Accelerator()
    expect(not accelerator.check_trigger(), "the flag was up at first")
    if accelerator.is_main_process:
        accelerator.set_trigger()
    expect(accelerator.check_trigger(), "the flag was not seen")
    expect(not accelerator.check_trigger(), "the flag was seen twice")


def test_reinstantiated_state() -> None:
    """An accelerator whose state was reset says so."""
    accelerator = Accelerator()
    AcceleratorState._reset_state()
    try:
        with assert_exception(AttributeError, "reset"):
            accelerator.prepare(torch.nn.Linear(1, 1))
    finally:
        Accelerator()


def rng_sync_check() -> None:
    """Generators that went different ways are brought together."""
    state = AcceleratorState()
    torch.rand(state.process_index)
    synchronize_rng_states(["torch"])
    expect(are_the_same_tensors(torch.get_rng_state()), "the generators of torch differ")
    generator = torch.Generator().manual_seed(state.process_index)
    synchronize_rng_states(["generator"], generator=generator)
    expect(are_the_same_tensors(generator.get_state()), "the generators differ")


def _epoch(loader: Any) -> list[int]:
    return torch.cat([ops.gather(batch) for batch in loader]).tolist()


def dl_preparation_check(dispatch_batches: bool = False) -> None:
    """Each sample comes once, in order or shuffled, with batches for each process or batches to split."""
    state = AcceleratorState()
    items: Any = range(32 * state.num_processes)
    for shuffle in (False, True):
        for split in (False, True):
            seen = _epoch(
                prepare_data_loader(
                    DataLoader(items, batch_size=8 * state.num_processes if split else 8, shuffle=shuffle),
                    state.device,
                    state.num_processes,
                    state.process_index,
                    split_batches=split,
                    put_on_device=True,
                    dispatch_batches=dispatch_batches,
                )
            )
            expect_equal(sorted(seen) if shuffle else seen, list(items), f"{shuffle=}, {split=}: the samples")


def central_dl_preparation_check() -> None:
    """The same where the first process reads for all."""
    dl_preparation_check(dispatch_batches=True)


class _OwnBatches:
    """A batch sampler of a user's own."""

    batch_size = 8

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(first, first + 8)) for first in range(0, self.length, 8))


def custom_sampler_check() -> None:
    """A batch sampler of a user's own stays in use."""
    state = AcceleratorState()
    items: Any = range(32 * state.num_processes)
    loader: Any = DataLoader(items, batch_sampler=_OwnBatches(len(items)))
    loader = prepare_data_loader(loader, state.device, state.num_processes, state.process_index)
    expect_equal(_epoch(loader), list(items), "the samples")
    sampler = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    expect(isinstance(sampler, _OwnBatches), f"the batch sampler is a {type(sampler).__name__}")


def _three_epochs(data_seed: int | None = None) -> tuple[Any, Any]:
    set_seed(42)
    settings = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=data_seed)
    loader = DataLoader(RegressionDataset(length=40, seed=42), batch_size=2, shuffle=True)
    loader = Accelerator(dataloader_config=settings).prepare(loader)
    return loader, [batch["x"].tolist() for _ in range(3) for batch in loader]


def check_seedable_sampler() -> None:
    """A seed and an epoch give one order of the samples, another epoch another one."""
    loader, first = _three_epochs()
    loader.set_epoch(0)
    expect_equal([batch["x"].tolist() for _ in range(3) for batch in loader], first, "the same epochs again")
    expect(first[: len(loader)] != first[len(loader) : 2 * len(loader)], "two epochs have the same order")


def check_seedable_sampler_with_data_seed() -> None:
    """A seed for the data alone gives another order."""
    one, other, again = (_three_epochs(data_seed=seed)[1] for seed in (42, 43, 42))
    expect(one != other, "two seeds gave the same order")
    expect_equal(again, one, "the same seed")


def check_seedable_sampler_in_batch_sampler_shard() -> None:
    """The sampler inside a loader that is shared out is the one with a seed."""
    needs(AcceleratorState().num_processes > 1, "several processes")
    items: Any = list(range(10))
    loader: Any = prepare_data_loader(DataLoader(items, batch_size=1, shuffle=True), use_seedable_sampler=True)
    sampler = loader.batch_sampler.batch_sampler.sampler
    expect(isinstance(sampler, SeedableRandomSampler), f"the sampler is a {type(sampler).__name__}")


def generate_baseline_dataloader(
    train_set: Any, generator: torch.Generator, batch_size: int, use_seedable_sampler: bool = False
) -> DataLoader[Any]:
    """A plain loader, shuffled by the generator or by a sampler with a seed."""
    if not use_seedable_sampler:
        return DataLoader(train_set, batch_size=batch_size, shuffle=True, generator=generator)
    sampler = SeedableRandomSampler(generator=generator, data_source=train_set, num_samples=len(train_set))
    return DataLoader(train_set, batch_size=batch_size, sampler=sampler)


def _train(model: Any, optimizer: Any, loader: Any, backward: Any) -> None:
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            backward(torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]))
            optimizer.step()


def _line() -> tuple[RegressionModel, torch.optim.SGD]:
    model = RegressionModel()
    model.first_batch = False
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def mock_training(
    length: int, batch_size: int, generator: torch.Generator, use_seedable_sampler: bool = False
) -> tuple[RegressionDataset, RegressionModel]:
    """Trains on one process, and returns the data and the model."""
    set_seed(42)
    generator.manual_seed(42)
    data = RegressionDataset(length=length, seed=42)
    model, optimizer = _line()
    loader = generate_baseline_dataloader(data, generator, batch_size, use_seedable_sampler)
    _train(model, optimizer, loader, torch.Tensor.backward)
    return data, model


def training_check(use_seedable_sampler: bool = False) -> None:
    """Shuffled data lead all processes to where one process gets with them."""
    accelerator = Accelerator()
    size, generator = accelerator.num_processes, torch.Generator()
    for split in (False, True):
        accelerator.dataloader_config = DataLoaderConfiguration(
            split_batches=split, use_seedable_sampler=use_seedable_sampler
        )
        data, alone = mock_training(32 * size, 8 * size, generator, use_seedable_sampler)
        model, optimizer = _line()
        batch_size = 8 * size if split else 8
        loader = generate_baseline_dataloader(data, generator, batch_size, use_seedable_sampler)
        loader, prepared, optimizer = accelerator.prepare(loader, model, optimizer)
        set_seed(42)
        generator.manual_seed(42)
        _train(prepared, optimizer, loader, accelerator.backward)
        weights = accelerator.get_state_dict(prepared)
        for name, wanted in alone.state_dict().items():
            torch.testing.assert_close(weights[name].float().cpu(), wanted, rtol=5e-2, atol=5e-2)
