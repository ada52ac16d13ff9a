"""Optimizer states that DeepSpeed keeps in files on a disk: which files those are, and how they are put back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str

from accelerate.errors import CheckpointError

# The name of a state, numbers of the first and the last parameter of a group, an ending.
_NAME = re.compile(r"((?:\w+-)?)(\d+_\d+)(\.tensor\.swp)")


def kept(engine: Any, tag: str) -> dict[str, Path]:
    """Where the files of an engine lie on this process, by their names in a checkpoint.

    Others in that folder are gradients, and what engines before have left.
    """
    own, saved = set(_groups(engine)), _place(tag, engine)
    found = {path: _NAME.fullmatch(path.name) for path in Path(_swapper(engine).swap_folder).iterdir()}
    return {f"{saved}/{path.name}": path for path, match in found.items() if match is not None and match[2] in own}


@contextmanager
def left_out(engine: Any) -> Iterator[None]:
    """Have an engine see no files of its own while it saves: it would copy them to where its other files go."""
    if not engine.zero_nvme_offload_optimizer():
        yield
        return
    swapper = _swapper(engine)
    with TemporaryDirectory(prefix="accelerate-deepspeed-") as empty:
        own, swapper.swap_folder = swapper.swap_folder, empty
        try:
            yield
        finally:
            swapper.swap_folder = own


def files(engine: Any, folder: Path, tag: str) -> dict[str, Path]:
    """The saved files of this process, by the names that its engine looks for.

    DeepSpeed names them after the numbers of parameters, which depend on what a process has made before.
    """
    saved = folder / _place(tag, engine)
    found = {path: match for path in saved.glob("*.swp") if (match := _NAME.fullmatch(path.name)) is not None}
    theirs = sorted({match[2] for match in found.values()}, key=lambda numbers: int(numbers.split("_")[0]))
    own = _groups(engine)
    if len(theirs) != len(own):
        raise CheckpointError(
            f"{saved} has {len(theirs)} groups of optimizer states, but {len(own)} are on a disk here: prepare the "
            "model and its optimizer as they were when the checkpoint was saved, on the same number of processes."
        )
    names = dict(zip(theirs, own, strict=True))
    return {f"{_place(tag, engine)}/{match[1]}{names[match[2]]}{match[3]}": path for path, match in found.items()}


def _place(tag: str, engine: Any) -> str:
    """The folder of this process in a checkpoint."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return f"{tag}/offloaded_tensors/rank{dp_index_to_str(rank)}"


def _swapper(engine: Any) -> Any:
    return engine.optimizer.optimizer_swapper


def _groups(engine: Any) -> list[str]:
    """The groups that are large enough to be on a disk, as files are named after them."""
    optimizer = engine.optimizer
    every = enumerate(optimizer.fp32_partitioned_groups_flat)
    return [group.ds_id for number, group in every if optimizer._swappable_optimizer_subgroup(number)]


@contextmanager
def linked(names: dict[str, Path]) -> Iterator[str]:
    """A folder in which files have other names."""
    with TemporaryDirectory(prefix="accelerate-deepspeed-") as folder:
        for name, path in names.items():
            link = Path(folder, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        yield folder


def put_rest(engine: Any, saved: dict[str, Any]) -> None:
    """Put what is not on a disk into an optimizer: small groups, steps, settings, the scale of losses.

    DeepSpeed leaves all of that as it is.
    """
    optimizer = engine.optimizer
    inner = optimizer.optimizer
    optimizer.loss_scaler = saved["loss_scaler"]
    optimizer.dynamic_loss_scale = saved["dynamic_loss_scale"]
    optimizer.overflow = saved["overflow"]
    states = saved["optimizer_state_dict"]
    for own, group in zip(inner.param_groups, states["param_groups"], strict=True):
        own.update({name: value for name, value in group.items() if name != "params"})
    flat = optimizer.fp32_partitioned_groups_flat
    of_group = optimizer.sub_group_to_group_id
    # In the order in which the optimizer has numbered them.
    order = sorted(range(len(flat)), key=lambda number: (of_group[number], number))
    for index, number in enumerate(order):
        _copy(saved["fp32_flat_groups"][number], flat[number])
        state = inner.state[flat[number]]
        for name, value in states["state"].get(index, {}).items():
            if not isinstance(value, torch.Tensor):
                state[name] = value
                continue
            if name not in state:  # before the first step
                size = value.numel() or optimizer.fp16_partitioned_groups_flat_numel[number]
                state[name] = torch.empty(value.shape if value.numel() else size, dtype=value.dtype)
            _copy(value, state[name])


def _copy(saved: torch.Tensor, own: torch.Tensor) -> None:
    if saved.numel() > 0:  # what is on a disk has no values here
        own.data.copy_(saved.data)
