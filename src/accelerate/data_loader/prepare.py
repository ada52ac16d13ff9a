"""From a script's DataLoader to the one that this process iterates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from accelerate.comm import current
from accelerate.data_loader.base import PreparedLoader
from accelerate.data_loader.dispatcher import DataLoaderDispatcher
from accelerate.data_loader.indexed import IndexedRandomSampler
from accelerate.data_loader.iterable import CountingCollate, IterableDatasetShard, knows_shards
from accelerate.data_loader.samplers import (
    RANDOM_SAMPLERS,
    BatchSamplerShard,
    KeptShard,
    SamplerShard,
    SeedableRandomSampler,
    check_split,
    sampler_in_use,
    sampler_owner,
)
from accelerate.data_loader.shard import DataLoaderShard
from accelerate.data_loader.torch_loaders import kept_arguments, same_batches
from accelerate.errors import warn
from accelerate.parallel.mesh import shares_of_ranks
from accelerate.state import PartialState


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    data_shares: list[int] | None = None,
    shuffle: str | None = None,
) -> Any:
    """Make a loader with the same data, of which each process gets its shard.

    Args:
        dataloader: the torch `DataLoader`. One that was prepared before is returned as it is, with a warning.
        device: where batches are moved, with `put_on_device`.
        num_processes: how many processes share the data; by default all of them.
        process_index: which one this is; by default its rank.
        split_batches: whether the batch size is that of all processes together.
        put_on_device: whether batches are moved to `device`.
        rng_types: the random states that follow rank 0 at the start of each epoch.
        dispatch_batches: whether rank 0 alone reads, and sends the others their part; by default for iterable datasets,
            when batches are put on the device.
        even_batches: whether samples from the start fill up the end, so that all processes take equally many steps.
        slice_fn_for_dispatch: how to slice a batch that is dispatched, called as
            `slice_fn(batch, slice, process_index=, num_processes=)`.
        use_seedable_sampler: whether the order depends on the seed and the epoch alone.
        data_seed: that seed; by default torch's initial seed.
        non_blocking: whether to copy without waiting even if a batch is not pinned.
        use_stateful_dataloader: whether to use torchdata's `StatefulDataLoader`.
        torch_device_mesh: a mesh whose processes along `tp`, `cp` and `sp` get the same data.
        data_shares: for every rank the number of the shard it gets, in place of a mesh.
        shuffle: `"indexed"` to shuffle without a list of all indices.

    Returns:
        A `DataLoaderShard`, or a `DataLoaderDispatcher` where batches are dispatched.

    Raises:
        ValueError: if the processes do not divide the batch size with `split_batches`, or if batches are to be
            dispatched but not put on the device.
    """
    if isinstance(dataloader, PreparedLoader):
        warn(
            "This loader was prepared before: it is not sharded again, because that would skip data; "
            "prepare each loader once."
        )
        return dataloader
    state = PartialState()
    processes = state.num_processes if num_processes is None else num_processes
    index = state.process_index if process_index is None else process_index
    shares = data_shares or shares_of_ranks(torch_device_mesh, processes)
    processes, index = max(shares) + 1, shares[index]
    iterable = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = iterable and put_on_device
    if dispatch_batches and not put_on_device:
        raise ValueError(
            "dispatch_batches=True needs put_on_device=True, because it sends batches to the devices: turn on device "
            "placement, or set dispatch_batches=False."
        )
    size = dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None)
    if split_batches and size is not None and size > 1:
        check_split(size, processes)
    kind = IndexedRandomSampler if shuffle == "indexed" else SeedableRandomSampler if use_seedable_sampler else None
    generator = _shared_order(dataloader, kind, data_seed, all_read=processes > 1 and not dispatch_batches)
    arguments = kept_arguments(dataloader) | {
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
        "_follows_rank_0": state.num_processes > 1,
        "torch_device_mesh": torch_device_mesh,
        "synchronized_generator": generator,
    }
    dataset = dataloader.dataset
    if dispatch_batches:
        return DataLoaderDispatcher(
            dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            data_shares=data_shares,
            **arguments,
            **same_batches(dataloader),
        )
    batches = same_batches(dataloader)
    if processes > 1:
        if iterable and not split_batches and knows_shards(dataset, processes):
            dataset = dataset.shard(num_shards=processes, index=index)
        elif iterable:
            size = dataloader.batch_size
            dataset = IterableDatasetShard(
                dataset,
                batch_size=processes if size is None and split_batches else size or 1,
                drop_last=dataloader.drop_last,
                num_processes=processes,
                process_index=index,
                split_batches=split_batches,
            )
            dataset.mark_repeats = True
            arguments["collate_fn"] = CountingCollate(dataloader.collate_fn)
            if split_batches and size is not None:
                batches["batch_size"] = size // processes
        else:
            batches = _sharded_batches(dataloader, processes, index, split_batches, even_batches)
    return DataLoaderShard(
        dataset,
        device=device if put_on_device else None,
        rng_types=rng_types,
        **arguments,
        **batches,
    )


def _sharded_batches(
    loader: Any, processes: int, index: int, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    distributed = _own_distributed_sampler(loader, processes)

    def shard(batch_sampler: Any, split_batches: bool) -> BatchSamplerShard | KeptShard:
        if distributed is not None:
            return KeptShard(batch_sampler, distributed)
        return BatchSamplerShard(batch_sampler, processes, index, split_batches, even_batches)

    if isinstance(loader.sampler, BatchSampler):  # batches as "indices" of a dataset that takes lists
        return {"sampler": shard(loader.sampler, split_batches), "batch_size": None}
    if loader.batch_sampler is None:  # batch_size=None: each index is a batch
        single = shard(BatchSampler(loader.sampler, batch_size=1, drop_last=False), False)
        return {"sampler": SamplerShard(loader.sampler, single), "batch_size": None}
    return {"batch_sampler": shard(loader.batch_sampler, split_batches)}


def _shared_order(
    loader: Any, seedable: type[SeedableRandomSampler] | None, data_seed: int | None, *, all_read: bool
) -> torch.Generator | None:
    """Make all processes shuffle alike; the generator, if any, that has to follow rank 0 for that.

    seedable: the sampler that shuffles in place of torch's own, if any.
    all_read: whether several processes read, each of them its part; otherwise the order is that of the plain loader.
    """
    if isinstance(loader.dataset, IterableDataset):
        generator = getattr(loader.dataset, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None
    owner, sampler = sampler_owner(loader), sampler_in_use(loader)
    if seedable is not None and isinstance(sampler, RandomSampler) and owner is not None:
        if sampler.replacement:
            seedable = SeedableRandomSampler  # what may come twice is no order of all there is
        seed: list[Any] = [torch.random.initial_seed() if data_seed is None else data_seed]
        # Processes may have been seeded differently on purpose; the order of the data must be one.
        current().broadcast_objects(seed)
        owner.sampler = seedable(
            sampler.data_source,
            replacement=sampler.replacement,
            # None for as many as there are.
            num_samples=None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples,
            generator=sampler.generator or torch.Generator(),
            data_seed=seed[0],
        )
        return None
    if all_read and isinstance(sampler, RANDOM_SAMPLERS) and sampler.generator is None:
        # The default one is torch's global generator, whose state is a different one on each process.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    # A batch sampler of its own may do the shuffling itself.
    generator = getattr(sampler, "generator", None) or getattr(owner, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _own_distributed_sampler(loader: Any, processes: int) -> DistributedSampler[Any] | None:
    """The loader's DistributedSampler, where it makes the shares of just these processes."""
    sampler = sampler_in_use(loader)
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas != processes:
        return None
    warn(
        f"This loader's DistributedSampler already gives each of the {processes} processes its share: it is kept as it "
        "is; pass a loader with a plain sampler to have accelerate shard it."
    )
    return sampler
