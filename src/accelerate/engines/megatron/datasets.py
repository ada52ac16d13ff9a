"""The indexed datasets of Megatron-LM, and loaders of them that begin where a training was."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from accelerate.config.megatron import MegatronLMPlugin
from accelerate.engines.megatron.arguments import arguments
from accelerate.errors import NotYetSupported

Provider = Callable[[list[int]], tuple[Any, Any, Any]]


class _From(Sampler[int]):
    """One sample after the other. start: how many were used before."""

    def __init__(self, dataset: Any, start: int) -> None:
        self.start = min(start, len(dataset))
        self.end = len(dataset)

    def __iter__(self) -> Any:
        return iter(range(self.start, self.end))

    def __len__(self) -> int:
        return self.end - self.start


def loaders(plugin: MegatronLMPlugin, provider: Provider) -> tuple[Any, Any, Any]:
    """Loaders of the datasets for training, validation and test; None where one has no samples."""
    args = arguments(plugin)
    size = args.micro_batch_size * args.num_micro_batches
    starts = args.consumed_samples or (0, 0, 0)
    made = [
        DataLoader(dataset, batch_size=size, sampler=_From(dataset, start), drop_last=True)
        if isinstance(dataset, Dataset) and len(dataset)  # type: ignore[arg-type]
        else None
        for dataset, start in zip(provider(samples(args)), starts, strict=True)
    ]
    return made[0], made[1], made[2]


def samples(args: SimpleNamespace) -> list[int]:
    """How many samples training, validation and test need, as Megatron-LM counts them."""
    steps = getattr(args, "train_iters", None)
    training = getattr(args, "train_samples", None) or (steps or 0) * args.global_batch_size
    if not training:
        raise ValueError(
            "The number of samples to take from an indexed dataset is not known: set `train_iters` of the "
            "MegatronLMPlugin, or prepare a MegatronLMDummyScheduler(optimizer, total_num_steps=...) with it."
        )
    steps = steps or training // args.global_batch_size
    validations = steps // args.eval_interval + 1
    return [training, validations * args.eval_iters * args.global_batch_size, args.eval_iters * args.global_batch_size]


def provider(plugin: MegatronLMPlugin) -> Provider:
    """Makes the datasets of a GPT from files of tokens (`data_path`), as Megatron-LM's own tools write them."""

    def datasets(counts: list[int]) -> tuple[Any, Any, Any]:
        args = arguments(plugin)
        if args.model_type_name != "gpt" or args.data_path is None:
            raise NotYetSupported(
                "making indexed datasets other than those of a GPT from `data_path`",
                "give the MegatronLMPlugin a `custom_megatron_datasets_provider_function`.",
            )
        return _gpt_datasets(args, counts)

    return datasets


def _gpt_datasets(args: SimpleNamespace, counts: list[int]) -> tuple[Any, Any, Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    paths = list(args.data_path) if isinstance(args.data_path, (list, tuple)) else [args.data_path]
    config = GPTDatasetConfig(
        random_seed=1234 if args.seed is None else args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(paths),
        split=args.split,
        tokenizer=_Tokens(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        mmap_bin_files=True,
        path_to_cache=args.data_cache_path,
    )
    made = BlendedMegatronDatasetBuilder(GPTDataset, counts, lambda: True, config).build()
    first, second, third = (None if dataset is None else _Texts(dataset) for dataset in made)
    return first, second, third


class _Texts(Dataset[dict[str, torch.Tensor]]):
    """Samples as train steps take them from any dataset of Megatron-LM: tokens, of which each is a label as well."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.dataset[index]
        return {"text": torch.cat([sample["tokens"], sample["labels"][-1:]])}


class _Tokens:
    """What an indexed dataset, whose texts are tokens already, wants to know of its tokenizer."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.eod = self.pad = 0 if args.eos_token_id is None else args.eos_token_id
        self.vocab_size = args.orig_vocab_size
        self.unique_identifiers = {"eod": str(self.eod), "vocab_size": str(self.vocab_size)}
