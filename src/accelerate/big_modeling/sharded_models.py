"""A checkpoint of whole tensors into a model that is spread over ranks."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from accelerate.big_modeling.weight_files import Contents, open_weights, refuse_shapes, report_names, weight_files
from accelerate.comm import current
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
    names = sorted({name for content in contents for name in (*content.tensors, *content.others)})
    shapes = {name: tuple(source.shape) for content in contents for name, source in content.tensors.items()}
    count = len(contents)
    if broadcast_from_rank0:
        told: list[Any] = [names, shapes, count, failed]
        current().broadcast_objects(told)
        names, shapes, count, failed = told
    if failed is not None:
        raise failed
    state = model.state_dict()
    known = set(state)
    # Of a tensor that has several names one is enough.
    shared = names_of_shared(tensor_places(model))
    same = {name for group in shared if not set(names).isdisjoint(group) for name in group}
    report_names(model, checkpoint, sorted(known - set(names) - same), sorted(set(names) - known), strict)
    if full_state_dict:
        extra = set(extra_state_names(model))
        here = {name: tuple(state[name].shape) for name in shapes.keys() & known - extra}
        refuse_shapes(model, checkpoint, {name: (shapes[name], here[name]) for name in shapes if name in here})
    for number in range(count):
        weights = {name: source.mapped() for name, source in contents[number].tensors.items()} if reads else {}
        set_model_state_dict(model, {n: w for n, w in weights.items() if n in known}, options=options)
