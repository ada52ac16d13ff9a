"""Joining batches and cutting them into pieces, sample by sample.

Tensors are joined and cut along their first dimension, lists of other objects (strings, numbers) that have one entry
per sample likewise. Anything else (single numbers, tensors without a dimension) belongs to the batch as a whole.
A list of samples that were not collated at all is joined and cut as a list.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelerate.comm.tree import honor_mapping, honor_type, leaves


def batch_length(batch: Any) -> int | None:
    """How many samples a batch has: the length of its first tensor or, without one, of its first list of objects."""
    if _are_samples(batch):
        return len(batch)
    if _is_ragged(batch):
        return None
    for tensor in leaves(batch):
        if tensor.ndim > 0:
            return tensor.shape[0]
    if isinstance(batch, (list, tuple)) and batch:
        return len(batch) if _is_plain(batch) else batch_length(batch[0])
    if isinstance(batch, Mapping) and batch:
        return next((length for length in map(batch_length, batch.values()) if length is not None), None)
    return None


def join(batches: list[Any]) -> Any:
    """One batch with the samples of all of them."""
    if all(isinstance(batch, list) for batch in batches):
        samples = [sample for batch in batches for sample in batch]
        if _are_samples(samples):
            return samples
    lengths = [batch_length(batch) for batch in batches]

    def join_leaves(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            return torch.cat(values) if first.ndim else first
        if _per_sample(values, lengths):
            return type(first)(entry for value in values for entry in value)
        return first

    return _walk(join_leaves, batches, lengths)


def cut(batch: Any, piece: slice) -> Any:
    """The samples `piece` of a batch."""
    if _are_samples(batch):
        return batch[piece]
    length = batch_length(batch)

    def cut_leaf(values: list[Any]) -> Any:
        value = values[0]
        if isinstance(value, torch.Tensor):
            return value[piece] if value.ndim else value
        return value[piece] if _per_sample(values, [length]) else value

    return _walk(cut_leaf, [batch], [length])


def _are_samples(batch: Any) -> bool:
    """Whether a batch is a list of samples as the dataset gives them, by a collate function that does nothing.

    Such dicts have the same keys, and single values, of which collating makes tensors or lists; or else tensors of
    different lengths, which those of one batch do not have. Tuples have a single value beside a tensor.
    """
    if not isinstance(batch, list) or not batch:
        return False
    first = batch[0]
    if isinstance(first, dict):
        if any(not isinstance(sample, dict) or sample.keys() != first.keys() for sample in batch):
            return False
        lengths = {tensor.shape[:1] for tensor in leaves(batch)}
        return len(lengths) > 1 or any(map(_is_single, first.values()))
    if not isinstance(first, tuple) or any(type(sample) is not type(first) for sample in batch):
        return False
    return any(map(_is_single, first)) and any(isinstance(value, torch.Tensor) and value.ndim for value in first)


def _is_ragged(batch: Any) -> bool:
    """Whether a list of tensors is not one of tensors with an entry per sample, as they differ in length."""
    if not isinstance(batch, list) or not all(isinstance(item, torch.Tensor) for item in batch):
        return False
    return len({tensor.shape[0] for tensor in batch if tensor.ndim}) > 1


def _is_single(value: Any) -> bool:
    return value.ndim == 0 if isinstance(value, torch.Tensor) else isinstance(value, (int, float, str))


def _per_sample(values: list[Any], lengths: list[int | None]) -> bool:
    return all(
        isinstance(value, (list, tuple)) and _is_plain(value) and len(value) == length
        for value, length in zip(values, lengths, strict=True)
    )


def _is_plain(value: Any) -> bool:
    """Whether a list or tuple holds objects rather than nested data."""
    nested = (torch.Tensor, list, tuple, Mapping)
    return not hasattr(value, "_fields") and not any(isinstance(entry, nested) for entry in value)


def _walk(function: Callable[[list[Any]], Any], values: list[Any], lengths: list[int | None]) -> Any:
    """Apply `function` to what stands at the same place in all the equally nested `values`."""
    first = values[0]
    if isinstance(first, (list, tuple)) and not _per_sample(values, lengths):
        return honor_type(first, (_walk(function, list(items), lengths) for items in zip(*values, strict=True)))
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: _walk(function, [v[key] for v in values], lengths) for key in first})
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        result = copy.copy(first)
        for field in dataclasses.fields(first):
            # object.__setattr__ so that frozen dataclasses work too.
            entries = [getattr(value, field.name) for value in values]
            object.__setattr__(result, field.name, _walk(function, entries, lengths))
        return result
    return function(values)
