"""Loading as torch does it, for models that do more with a checkpoint than to take values by their names."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.big_modeling.weight_files import Contents, report_names
from accelerate.checkpoint.parts import snapshot_model
from accelerate.errors import Unfit
from accelerate.offload.module_tensors import STAND_INS, table_of
from accelerate.offload.parameters import like
from accelerate.torch_internals.modules import parameters_of, set_metadata

Holders = dict[str, tuple[nn.Module, str]]


def load_by_torch(
    model: nn.Module, places: Holders, contents: Contents, shared: list[list[str]], checkpoint: Any, strict: bool
) -> None:
    """Pass a checkpoint to `load_state_dict`. If that fails, the tensors of the model stay as they were."""
    state = OrderedDict({name: source.mapped() for name, source in contents.tensors.items()} | contents.others)
    if contents.metadata:
        set_metadata(state, OrderedDict(contents.metadata))
    with ExitStack() as undo:
        snapshot_model(model, undo)  # hooks may change anything
        empty = _make_room(places)
        try:
            found: Any = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise Unfit(
                f"{checkpoint} does not fit this {type(model).__name__} ({' '.join(str(error).split())}): give the "
                "model that it was saved from."
            ) from error
        # A method of the model's own may return nothing.
        missing, unexpected = (set(getattr(found, f"{kind}_keys", ())) for kind in ("missing", "unexpected"))
        missing -= {name for group in shared if not missing.issuperset(group) for name in group}
        report_names(model, checkpoint, sorted(missing), sorted(unexpected), strict)
        undo.pop_all()
    for name in missing & empty.keys():
        module, attribute = places[name]
        table_of(module, attribute)[attribute] = empty[name]


def _make_room(places: Holders) -> dict[str, torch.Tensor]:
    """Give empty tensors memory on the CPU, where torch writes their values; returns them by name."""
    empty: dict[str, torch.Tensor] = {}
    filled: dict[int, torch.Tensor] = {}  # one that has several names stays one
    for name, (module, attribute) in places.items():
        table = table_of(module, attribute)
        tensor = table[attribute]
        if is_lazy(tensor) or not tensor.is_meta or isinstance(tensor, STAND_INS):
            continue
        if id(tensor) not in filled:
            with torch.inference_mode(False):
                zeros = torch.zeros_like(tensor, device="cpu")
            filled[id(tensor)] = like(tensor, zeros) if attribute in parameters_of(module) else zeros
        empty[name] = tensor
        table[attribute] = filled[id(tensor)]
    return empty
