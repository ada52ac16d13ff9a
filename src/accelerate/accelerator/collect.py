"""Collecting: values from all processes, in and out of evaluation loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from accelerate.accelerator.base import AcceleratorBase
from accelerate.comm import ops
from accelerate.comm.tree import is_nested, items_of, leaves, map_items
from accelerate.strategies import Outputs

Nested = TypeVar("Nested")  # a tensor, or lists, tuples and dicts of them: what goes in comes out


class Collecting(AcceleratorBase):
    def gather(self, tensor: Nested) -> Nested:
        """Concatenate the tensors of nested data over all ranks along the first dimension.

        Lengths may differ between ranks. Tensors without a dimension come back with one entry per rank.

        Args:
            tensor: a tensor, or nested lists, tuples and dicts of tensors. Call it on all ranks.

        Returns:
            The same structure with the gathered tensors. On one process, the object itself.
        """
        gathered: Nested = ops.gather(tensor)
        return gathered

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of an evaluation step, exactly one per sample.

        Samples that were repeated to fill the last batch are dropped from tensors and lists that hold one entry per
        sample. Tensors without a dimension come back with one entry per rank; where `batch_size=None` makes every
        sample a batch, without those of repeats.

        Args:
            input_data: tensors, nested structures of them, or lists of picklable objects.
            use_gather_object: gather by pickling, whatever `input_data` holds.

        Returns:
            The gathered data, the same on every rank.

        Example:
            ```python
            for inputs, targets in eval_loader:
                predictions, targets = accelerator.gather_for_metrics((model(inputs), targets))
                metric.update(predictions, targets)
            ```
        """
        loader = self.gradient_state.active_dataloader
        real = None if loader is None else loader.real_samples
        if loader is not None and real is None:
            _note_lengths(input_data, loader)
        if self.num_processes == 1 and real is None:
            return input_data
        if self._outputs_repeat:
            input_data = _only_what_counts(input_data, self._strategy.outputs())
        if use_gather_object:
            return ops.gather_object(input_data if real is None else input_data[: _kept(len(input_data), loader)])
        # Before the cut, which may leave a rank with an empty list: every rank must decide alike.
        only_tensors = _only_tensors(input_data)
        one_after_the_other = _are_only_lists_of_objects(input_data)
        if real is not None:
            input_data = _without_repeats(input_data, loader)
        if self.num_processes == 1:
            return input_data
        if one_after_the_other:
            return ops.gather_object(input_data)
        return ops.gather(input_data) if only_tensors else _gather_mixed(input_data)

    def reduce(self, tensor: Nested, reduction: str = "sum", scale: float = 1.0) -> Nested:
        """Reduce each tensor of nested data over all ranks.

        Args:
            tensor: a tensor, or nested lists, tuples and dicts of tensors. Call it on all ranks.
            reduction: "sum", "mean", "max", or "none" to leave the tensors as they are.
            scale: a factor for devices whose reduction takes one (XLA); it has no effect elsewhere.

        Returns:
            The same structure with the reduced tensors, the same on every rank.
        """
        reduced: Nested = ops.reduce(tensor, reduction, scale)
        return reduced

    def pad_across_processes(
        self, tensor: Nested, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Nested:
        """Pad tensors to the largest size over all ranks, so that they can be gathered.

        Args:
            tensor: a tensor, or nested lists, tuples and dicts of tensors. Call it on all ranks.
            dim: the dimension to pad.
            pad_index: the value to pad with.
            pad_first: pad at the beginning instead of the end.

        Returns:
            The same structure with the padded tensors.
        """
        padded: Nested = ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)
        return padded

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees on every process."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Tell whether any rank has called `set_trigger` since the last check. Call it on all ranks."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self._communicator.verify("check_trigger", flag)
        raised = bool(self._communicator.all_reduce(flag.clone(), "max").item())
        if raised:
            self.flag_tensor = None
        return raised


def _only_what_counts(data: Any, outputs: Outputs) -> Any:
    """Of processes that work on the same samples, only one has anything to give."""
    if isinstance(data, torch.Tensor):
        if data.ndim == 0:
            return data.reshape(1) if outputs.values else data.reshape(1)[:0]
        return data if outputs.samples else data[:0]
    if _is_list_of_objects(data):
        return data if outputs.samples else data[:0]
    return map_items(lambda item: _only_what_counts(item, outputs), data) if is_nested(data) else data


def _kept(length: int, loader: Any) -> int:
    """How many of `length` entries belong to samples that are no repeats.

    An entry per sample, or a fixed number of them; anything else has nothing to do with samples and is kept whole.
    """
    size = loader.batch_samples
    if size and length and length % size == 0:
        return int(loader.real_samples * (length // size))
    return length


def _is_for_a_full_batch(data: Any, loader: Any) -> bool:
    """Whether a smaller last batch got one value for every sample of a full one, as by `loss.repeat(batch_size)`."""
    length, full = len(data), loader.own_batch_size
    if not loader.batch_samples < length == full or data.ndim != 1:
        return False
    per_sample, rest = divmod(length, loader.batch_samples)
    if rest:
        return True
    # Or it got several for each of its samples, which may all be equal: full batches have told which of the two.
    usual = loader.lengths_of_values
    return full in usual and full * per_sample not in usual and bool((data == data[0]).all())


def _note_lengths(data: Any, loader: Any) -> None:
    """Remember how many values a full batch gets. Nothing is built again: not every container can be."""
    if _is_row(data):
        loader.lengths_of_values.add(len(data))
    elif is_nested(data):
        for item in items_of(data):
            _note_lengths(item, loader)


def _is_row(data: Any) -> bool:
    return (isinstance(data, torch.Tensor) or _is_array(data)) and data.ndim == 1


def _without_repeats(data: Any, loader: Any) -> Any:
    if isinstance(data, torch.Tensor) or _is_array(data):
        if data.ndim == 0:
            # With `batch_size=None`, a value without a dimension is that of a sample.
            return data[None][:0] if loader.batch_sampler is None and loader.real_samples == 0 else data
        return _first(data, loader.real_samples if _is_for_a_full_batch(data, loader) else _kept(len(data), loader))
    if _is_list_of_objects(data):
        return _first(data, _kept(len(data), loader))
    if not is_nested(data):
        return data
    items = list(items_of(data))
    kept = [_without_repeats(item, loader) for item in items]
    if all(new is old for new, old in zip(kept, items, strict=True)):
        return data
    rest = iter(kept)
    return map_items(lambda _: next(rest), data)


def _first(data: Any, length: int) -> Any:
    """The first ones; itself where that is all: not everything can be cut or built again."""
    return data if length >= len(data) else data[:length]


def _is_list_of_objects(data: Any) -> bool:
    """Whether a list or tuple is one of objects, as a rule one for each sample, rather than a nesting of tensors."""
    if not isinstance(data, (list, tuple)) or _is_tuple_of_lists(data):
        return False
    return not _holds_tensors(data) or (isinstance(data, list) and _are_samples(data))


def _are_samples(items: list[Any]) -> bool:
    """Such as `[{"id": 3, "boxes": ...}, ...]`, where not everything is a tensor."""
    return all(isinstance(item, Mapping) for item in items) and not _only_tensors(items)


def _holds_tensors(data: Any) -> bool:
    return bool(leaves(data))


def _is_array(data: Any) -> bool:
    """Whether this is a numpy array, or something that passes for one."""
    return hasattr(data, "__array__") and getattr(data, "ndim", 0) > 0


def _is_tuple_of_lists(data: Any) -> bool:
    """Such as `(predictions, references)` or `(predictions, None)`; a list of lists has one list per sample."""
    if not isinstance(data, tuple):
        return False
    tuples = [isinstance(item, tuple) for item in data]
    return any(isinstance(item, list) for item in data) or (any(tuples) and not all(tuples))


def _are_only_lists_of_objects(data: Any) -> bool:
    """Such as `(predictions, references)`, and nothing around it: the released package chains the lists."""
    return isinstance(data, tuple) and all(isinstance(item, list) for item in data) and not _holds_tensors(data)


def _only_tensors(data: Any) -> bool:
    if isinstance(data, (list, tuple)) and not data:
        return False  # a list of objects, which need not be empty on other ranks
    return isinstance(data, torch.Tensor) or (is_nested(data) and all(map(_only_tensors, items_of(data))))


def _gather_mixed(data: Any) -> Any:
    """Tensors as tensors, lists (and arrays) of other objects as one long list, single objects as one per process."""
    if isinstance(data, torch.Tensor):
        return ops.gather(data)
    if _is_array(data) or _is_list_of_objects(data):
        return ops.gather_object(data)
    return map_items(_gather_mixed, data) if is_nested(data) else ops.gather_object([data])
