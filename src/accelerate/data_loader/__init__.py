"""Data loaders that know how many processes read from them."""

from accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.dispatcher import DataLoaderDispatcher
from accelerate.data_loader.iterable import IterableDatasetShard
from accelerate.data_loader.prepare import prepare_data_loader
from accelerate.data_loader.samplers import BatchSamplerShard, SeedableRandomSampler, get_sampler
from accelerate.data_loader.shard import DataLoaderShard
from accelerate.data_loader.skip import SkipDataLoader, skip_first_batches
from accelerate.data_loader.skip_samplers import SkipBatchSampler

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
