"""Checks loops over prepared loaders on two processes: even and uneven batches, workers, and where a loop goes on.

`accelerate launch --num_processes 2 test_distributed_data_loop.py`.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data import default_collate as collate

from accelerate.accelerator import Accelerator
from accelerate.available import is_torchdata_stateful_dataloader_available
from accelerate.config.data import DataLoaderConfiguration
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.test_utils.checks import expect, expect_equal, needs, run_checks, shared_folder

NUM_ELEMENTS = 22
NUM_WORKERS = 4
BATCH_SIZE = 4


class DummyDataset(Dataset[Any]):
    """Samples that know their place; an index may be a list of them, as batch samplers in place of samplers give."""

    def __len__(self) -> int:
        return NUM_ELEMENTS

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return {"index": index, "label": index % 2, "random_augmentation": torch.rand(1).item()}
        places = range(*index.indices(len(self))) if isinstance(index, slice) else index
        return [self[place] for place in places]


class DummyIterableDataset(IterableDataset[Any]):
    """A list as a stream."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def create_accelerator(even_batches: bool = True) -> Accelerator:
    """An accelerator for two processes."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even_batches))
    expect_equal(accelerator.num_processes, 2, "the number of processes")
    return accelerator


def create_dataloader(
    accelerator: Accelerator, dataset_size: int, batch_size: int, iterable: bool = False, shuffle: bool = False
) -> Any:
    """A prepared loader of the numbers below `dataset_size`; `shuffle` mixes those of a stream beforehand."""
    numbers = torch.randperm(dataset_size) if shuffle else torch.arange(dataset_size)
    dataset: Dataset[Any] = DummyIterableDataset(numbers) if iterable else TensorDataset(numbers)
    return accelerator.prepare(DataLoader(dataset, batch_size=batch_size))


def verify_dataloader_batch_sizes(
    accelerator: Accelerator,
    dataset_size: int,
    batch_size: int,
    process_0_expected_batch_sizes: list[int],
    process_1_expected_batch_sizes: list[int],
) -> None:
    """Checks how many samples each batch of this process has."""
    wanted = (process_0_expected_batch_sizes, process_1_expected_batch_sizes)[accelerator.process_index]
    sizes = [len(batch[0]) for batch in create_dataloader(accelerator, dataset_size, batch_size)]
    expect_equal(sizes, wanted, f"{dataset_size} samples by {batch_size}: the sizes of the batches")


def test_default_ensures_even_batch_sizes() -> None:
    """Both processes have as many batches, of the same sizes."""
    accelerator = create_accelerator()
    verify_dataloader_batch_sizes(accelerator, 3, 1, [1, 1], [1, 1])
    verify_dataloader_batch_sizes(accelerator, 7, 2, [2, 2], [2, 2])


def test_can_disable_even_batches() -> None:
    """Without that, no sample comes twice."""
    accelerator = create_accelerator(even_batches=False)
    verify_dataloader_batch_sizes(accelerator, 3, 1, [1, 1], [1])
    verify_dataloader_batch_sizes(accelerator, 7, 2, [2, 2], [2, 1])


def test_can_join_uneven_inputs() -> None:
    """A process with fewer batches waits for the other one, instead of leaving it alone."""
    accelerator = create_accelerator(even_batches=False)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = create_dataloader(accelerator, dataset_size=3, batch_size=1)
    with accelerator.join_uneven_inputs([model]):
        steps = [model(batch[0].float()).sum().backward() for batch in loader]
    accelerator.wait_for_everyone()
    expect_equal(len(steps), 2 - accelerator.process_index, "the number of steps")


def _join(accelerator: Accelerator, **options: Any) -> Any:
    return accelerator.join_uneven_inputs([accelerator.prepare(torch.nn.Linear(1, 1))], **options)


def test_join_raises_warning_for_non_ddp_distributed(accelerator: Accelerator) -> None:
    """Processes cannot leave a sharded model, which `join_uneven_inputs` says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([]):
            pass
    categories = [warning.category for warning in caught]
    expect(UserWarning in categories, f"the warnings were {categories}")


def _sharded() -> None:
    AcceleratorState._reset_state()
    test_join_raises_warning_for_non_ddp_distributed(Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()))
    AcceleratorState._reset_state()


_sharded.__name__ = test_join_raises_warning_for_non_ddp_distributed.__name__


def test_join_can_override_even_batches() -> None:
    """`even_batches` holds for all loaders inside the block, and not after it."""
    accelerator = create_accelerator()
    loaders = [create_dataloader(accelerator, dataset_size=3, batch_size=1) for _ in range(2)]
    with _join(accelerator, even_batches=False):
        inside = [loader.batch_sampler.even_batches for loader in loaders]
    after = [loader.batch_sampler.even_batches for loader in loaders]
    expect_equal((inside, after), ([False, False], [True, True]), "even_batches of two loaders, inside and after")


def test_join_can_override_for_mixed_type_dataloaders() -> None:
    """A loader of a stream, which has no such setting, does not keep the others from theirs."""
    accelerator = create_accelerator()
    create_dataloader(accelerator, dataset_size=3, batch_size=1, iterable=True)
    loader = create_dataloader(accelerator, dataset_size=3, batch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _join(accelerator, even_batches=False):
            inside = loader.batch_sampler.even_batches
    expect_equal((inside, loader.batch_sampler.even_batches), (False, True), "even_batches, inside and after")


def test_join_raises_warning_for_iterable_when_overriding_even_batches() -> None:
    """Who overrides the setting of a stream is told that it has none."""
    accelerator = create_accelerator()
    create_dataloader(accelerator, dataset_size=3, batch_size=1, iterable=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _join(accelerator, even_batches=False):
            pass
    categories = [warning.category for warning in caught]
    expect(UserWarning in categories, f"the warnings were {categories}")


def test_pickle_accelerator() -> None:
    """An accelerator with a loader can be pickled, and has the same state afterwards."""
    accelerator = create_accelerator()
    create_dataloader(accelerator, dataset_size=32, batch_size=4)
    again = pickle.loads(pickle.dumps(accelerator))
    expect_equal(repr(again.state.__dict__), repr(accelerator.state.__dict__), "the state")


def test_data_loader(data_loader: DataLoader[Any], accelerator: Accelerator) -> None:
    """An epoch has each sample once."""
    seen: list[int] = []
    for batch in accelerator.prepare(data_loader):
        index, _ = accelerator.gather_for_metrics((batch["index"], batch["label"]))
        seen.extend(index.tolist())
    expect_equal(sorted(seen), list(range(NUM_ELEMENTS)), "the samples of an epoch")


def test_data_loaders(accelerator: Accelerator) -> None:
    """An epoch has each sample once: in order, shuffled, from batch samplers, and read by workers."""
    data = DummyDataset()
    by_batches = BatchSampler(RandomSampler(data), batch_size=BATCH_SIZE, drop_last=False)
    for settings in (
        {"batch_size": BATCH_SIZE},
        {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": NUM_WORKERS},
        {"batch_sampler": by_batches},
        {"sampler": by_batches, "batch_size": None, "collate_fn": collate},
    ):
        test_data_loader(DataLoader(data, **settings), accelerator)


Saver = Callable[[Any], Callable[[], None]]


def _resumes(accelerator: Accelerator, save: Saver, iterable: bool) -> None:
    """Goes on, after loading, with exactly the batches that had not come when it was saved."""
    needs(is_torchdata_stateful_dataloader_available(), "torchdata's StatefulDataLoader")
    before = accelerator.dataloader_config
    accelerator.dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=True)
    size = 32 * accelerator.num_processes
    try:
        loader = create_dataloader(accelerator, size, batch_size=4, iterable=iterable, shuffle=True)
        rest = []
        for number, batch in enumerate(loader):
            if number == 2:
                load = save(loader)
            if number > 2:
                rest.append(copy.deepcopy(batch))
        load()
        again = list(loader)
    finally:
        accelerator.dataloader_config = before
        accelerator.free_memory()
    expect(len(rest) > 1, f"only {len(rest)} batches were left")
    expect_equal(str(again), str(rest), "the batches after loading")


def test_stateful_dataloader(accelerator: Accelerator) -> None:
    """A loader goes on where its own state dict was taken."""

    def save(loader: Any) -> Callable[[], None]:
        return functools.partial(loader.load_state_dict, copy.deepcopy(loader.state_dict()))

    for iterable in (True, False):
        _resumes(accelerator, save, iterable)


def test_stateful_dataloader_save_state(accelerator: Accelerator) -> None:
    """A loader goes on where `save_state` was called."""
    with shared_folder() as folder:

        def save(loader: Any) -> Callable[[], None]:
            place = accelerator.save_state(str(folder / type(loader.dataset).__name__))
            return functools.partial(accelerator.load_state, place)

        for iterable in (True, False):
            _resumes(accelerator, save, iterable)


def main() -> None:
    """Runs all checks."""
    state = PartialState()
    if state.num_processes != 2:
        state.print(f"Skipped, because it needs two processes, and there are {state.num_processes}.")
        return
    torch.manual_seed(state.process_index)
    run_checks(
        test_default_ensures_even_batch_sizes,
        test_can_disable_even_batches,
        test_can_join_uneven_inputs,
        test_join_can_override_even_batches,
        test_join_can_override_for_mixed_type_dataloaders,
        test_join_raises_warning_for_iterable_when_overriding_even_batches,
        test_pickle_accelerator,
    )
    accelerator = create_accelerator()
    run_checks(
        test_data_loaders,
        test_stateful_dataloader,
        test_stateful_dataloader_save_state,
        given=(accelerator,),
    )
    run_checks(_sharded)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
