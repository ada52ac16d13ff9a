"""A checkpoint of whole tensors into a model that is spread over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from accelerate.big_modeling.weight_files import (
    Contents,
    open_weights,
    refuse_shapes,
    refuse_unfit,
    report_names,
    weight_files,
)
from accelerate.comm import current
from accelerate.errors import a_kind_of
from accelerate.offload.module_tensors import extra_state_names, names_of_shared, tensor_places


def load_sharded(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Load each rank's shards of the weights, file by file; with `broadcast_from_rank0` only rank 0 reads them."""
    reads = not broadcast_from_rank0 or current().rank == 0
    options = StateDictOptions(full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=False)
    contents: list[Contents] = []
    failed: Exception | None = None
    try:
        contents = [open_weights(path) for path in weight_files(checkpoint)] if reads else []
    except Exception as error:
        failed = error
    state, extra = model.state_dict(), set(extra_state_names(model))
    known = set(state)
    names = sorted({name for content in contents for name in (*content.tensors, *content.others)})
    shapes = {name: tuple(source.shape) for content in contents for name, source in content.tensors.items()}
    # Extra states and sparse buffers, which are small, and whole on each rank.
    others = {name: value for content in contents for name, value in content.others.items() if name in known}
    others |= {
        name: source.mapped() for content in contents for name, source in content.tensors.items() if name in extra
    }
    count = len(contents)
    if broadcast_from_rank0:
        told: list[Any] = [names, shapes, others, count, failed]
        current().broadcast_objects(told)
        names, shapes, others, count, failed = told
    if failed is not None:
        raise failed
    # Of a tensor that has several names one is enough.
    shared = names_of_shared(tensor_places(model))
    same = {name for group in shared if not set(names).isdisjoint(group) for name in group}
    report_names(model, checkpoint, sorted(known - set(names) - same), sorted(set(names) - known), strict)
    sparse = {name: value for name, value in others.items() if name not in extra}
    _refuse_kinds(model, checkpoint, sparse, shapes.keys() - extra, state)
    if full_state_dict:
        shapes |= {name: tuple(value.shape) for name, value in sparse.items()}
        here = {name: tuple(state[name].shape) for name in shapes.keys() & known - extra}
        refuse_shapes(model, checkpoint, {name: (shapes[name], here[name]) for name in shapes if name in here})
    # With every file: of those that it is not given, torch sets an object of its own as the state.
    extras = {name: others.get(name, state[name]) for name in extra & known}
    for number in range(count):
        weights = {name: source.mapped() for name, source in contents[number].tensors.items()} if reads else {}
        own = {name: weight for name, weight in weights.items() if name in known}
        set_model_state_dict(model, {**own, **extras}, options=options)
    if sparse:
        options = StateDictOptions(full_state_dict=full_state_dict, strict=False)
        set_model_state_dict(model, {**sparse, **extras}, options=options)


def _refuse_kinds(
    model: nn.Module, checkpoint: Any, others: Mapping[str, Any], dense: Iterable[str], state: Mapping[str, Any]
) -> None:
    """Raise an error for what is not of the kind that the model has there, in its state dict.

    others: what is no dense tensor in the checkpoint. dense: the names of what is one.
    """
    wrong = []
    for name, value in sorted(others.items()):
        if not isinstance(value, torch.Tensor):
            wrong.append(f"{name} is {a_kind_of(value)} in it and a tensor in the model")
        elif value.layout is not state[name].layout:
            wrong.append(f"{name} is sparse in it and not in the model")
    for name in sorted(dense):
        if name in state and state[name].layout is not torch.strided:
            wrong.append(f"{name} is sparse in the model and not in it")
    refuse_unfit(model, checkpoint, wrong)
