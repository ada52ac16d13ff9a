"""Loading as torch does it, for models that do more with a checkpoint than to take values by their names."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.big_modeling.parameters import like
from accelerate.big_modeling.sources import Contents, report_names
from accelerate.big_modeling.tensors import STAND_INS, table_of
from accelerate.errors import Unfit
from accelerate.hooks.align import take_over
from accelerate.torch_internals.modules import (
    buffers_of,
    has_post_load_hooks,
    has_pre_load_hooks,
    loads_by_code_of,
    parameters_of,
    set_metadata,
)

Places = dict[str, tuple[nn.Module, str]]


def loads_by_itself(model: nn.Module, names_fit: bool) -> bool:
    """Says whether a model has code of its own for loading: hooks, extra state, or methods.

    names_fit: where the names of a checkpoint are those of the model, what torch's own modules have is not needed: they
    only know older names.
    """
    return type(model).load_state_dict is not nn.Module.load_state_dict or any(
        has_post_load_hooks(module)
        or has_pre_load_hooks(module, except_for=take_over)
        or type(module).set_extra_state is not nn.Module.set_extra_state
        or _has_code(module, names_fit)
        for module in model.modules()
    )


def _has_code(module: nn.Module, names_fit: bool) -> bool:
    code = loads_by_code_of(module)
    return code != nn.Module.__module__ and not (names_fit and code.startswith("torch.nn."))


def load_by_torch(
    model: nn.Module, places: Places, contents: Contents, shared: list[list[str]], checkpoint: Any, strict: bool
) -> None:
    """Hand a checkpoint to `load_state_dict`. Where that fails, the tensors of the model are left as they were."""
    state = OrderedDict({name: source.mapped() for name, source in contents.tensors.items()} | contents.others)
    if contents.metadata:
        set_metadata(state, OrderedDict(contents.metadata))
    with _kept_on_failure(model):
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
    for name in missing & empty.keys():
        module, attribute = places[name]
        table_of(module, attribute)[attribute] = empty[name]


def _make_room(places: Places) -> dict[str, torch.Tensor]:
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


@contextlib.contextmanager
def _kept_on_failure(model: nn.Module) -> Iterator[None]:
    """Hooks may change anything, so what was there is put aside: in host memory, which a device may have less of."""
    owners: list[MutableMapping[str, Any]] = [
        table for part in model.modules() for table in (parameters_of(part), buffers_of(part))
    ]
    tables = [(table, dict(table)) for table in owners]
    tensors = {id(tensor): tensor for _, content in tables for tensor in content.values() if _has_value(tensor)}
    values = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
    try:
        yield
    except BaseException:
        for table, content in tables:
            table.clear()
            table.update(content)
        for key, tensor in tensors.items():
            tensor.detach().copy_(values[key])
        raise


def _has_value(tensor: Any) -> bool:
    return tensor is not None and not is_lazy(tensor) and not tensor.is_meta
