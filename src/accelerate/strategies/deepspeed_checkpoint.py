"""What DeepSpeed puts into a checkpoint, file by file: its own layout, by this package's writers and readers."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from accelerate.checkpoint import layout
from accelerate.checkpoint.parts import File, Part
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.errors import CheckpointError
from accelerate.io import blocks
from accelerate.io.blocks import FileEntry
from accelerate.io.host_memory import HostMemory
from accelerate.io.safe_load import read_torch
from accelerate.io.stored_tensors import mapped
from accelerate.strategies import deepspeed_disk
from accelerate.strategies.deepspeed_resharding import own_part

# What DeepSpeed's files hold beside tensors and plain values.
_CLASSES = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)


class _InMemory(CheckpointEngine):
    """Takes what an engine would write, or gives it what was read already. files: the content of each, by path."""

    def __init__(self, files: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.files: dict[str, Any] = files or {}

    def create(self, info: Any) -> None: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def save(self, state_dict: Any, path: str) -> None:
        self.files[path] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.files[path]

    def commit(self, info: Any) -> bool:
        return True


@contextmanager
def _instead(engine: Any, other: CheckpointEngine, names: list[str] | None = None) -> Iterator[None]:
    """names: the files with the states of the model, instead of those the engine would look for."""
    own, engine.checkpoint_engine = engine.checkpoint_engine, other
    if names is not None:
        engine._get_all_ckpt_names = lambda *args: names
    try:
        yield
    finally:
        engine.checkpoint_engine = own
        if names is not None:
            del engine._get_all_ckpt_names


@dataclass
class _Lying:
    """A file that lies on a disk already. folder: a temporary one that it is in, which goes when nobody needs it."""

    source: Path
    name: str
    folder: TemporaryDirectory[str] | None = None

    def copied(self, memory: HostMemory) -> _Lying:
        return self  # nobody changes it meanwhile: where an engine would, `can_copy_aside` is False

    def write(self, folder: Path, group: Any) -> dict[str, FileEntry]:
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = blocks.write_file(path, [mapped(self.source)])
        path.chmod(self.source.stat().st_mode)
        return {self.name: entry}


def parts(engine: Any, number: int, **kwargs: Any) -> Iterator[Part]:
    """What this process writes of an engine. kwargs: for its `save_checkpoint`. Called on all processes."""
    collected, tag = _InMemory(), layout.engine_folder(number)
    on_disk = deepspeed_disk.kept(engine, tag) if engine.zero_nvme_offload_optimizer() else {}
    # Small files that help people are written all the same.
    folder = TemporaryDirectory(prefix="accelerate-deepspeed-")
    with _instead(engine, collected), deepspeed_disk.left_out(engine):
        engine.save_checkpoint(folder.name, tag=tag, **kwargs)
    for path, content in collected.files.items():
        yield File(os.path.relpath(path, folder.name), content)
    for left in sorted(Path(folder.name).rglob("*")):
        if left.is_file():
            yield _Lying(left, str(left.relative_to(folder.name)), folder)
    for name, swapped in on_disk.items():
        yield _Lying(swapped, name)


def read(
    engine: Any, reader: CheckpointReader, number: int, torch_load: dict[str, Any], **kwargs: Any
) -> Callable[[], None]:
    """Read what `parts` has written and see that it fits; returns what puts it into the engine."""
    folder, tag = str(reader.folder), layout.engine_folder(number)
    # In stage 3 each process has a file of its own, and there may be more of them now.
    first = engine._get_ckpt_name(folder, tag, mp_placeholder="*", pp_placeholder="0")
    names: list[str] = engine._get_all_ckpt_names(folder, tag) or sorted(glob.glob(first))
    if not names:
        if any(reader.folder.glob(f"{tag}/*_model_states.pt")):
            raise CheckpointError(
                f"{reader.folder / tag} was saved in another stage of ZeRO, whose shards differ from those of stage "
                f"{engine.zero_optimization_stage()}: set the stage as it was."
            )
        raise CheckpointError(
            f"{reader.folder} has no model number {number} of DeepSpeed (no {tag}/*_model_states.pt): load a "
            "checkpoint that was saved with it."
        )
    files = {path: _read(path, torch_load) for path in names}
    content = files[names[0]]
    _check(engine, content, reader.folder / tag)
    if engine.zero_optimization():
        path = engine._get_zero_ckpt_name(folder, tag)
        saved, here = content["dp_world_size"], engine.seq_dp_world_size
        if saved == here:
            files[path] = _read(path, torch_load)
        else:
            _check_pieces(engine, content, reader.folder / tag, saved)
            files[path] = {"optimizer_state_dict": _recut(engine, content["param_shapes"], saved, path, torch_load)}
            content["dp_world_size"] = here
    arguments: dict[str, Any] = {"load_module_strict": kwargs.pop("strict", True), **kwargs}
    on_disk = deepspeed_disk.files(engine, reader.folder, tag) if engine.zero_nvme_offload_optimizer() else None

    def put() -> None:
        with _instead(engine, _InMemory(files), names):
            if on_disk is None:
                found, _ = engine.load_checkpoint(folder, tag, **arguments)
            else:
                deepspeed_disk.put_rest(engine, files[path]["optimizer_state_dict"])
                with deepspeed_disk.linked(on_disk) as links:
                    found, _ = engine.load_checkpoint(links, tag, **arguments)
        if found is None:
            raise CheckpointError(
                f"DeepSpeed has found nothing to load in {reader.folder / tag}: load another checkpoint."
            )
        _count_again(engine.basic_optimizer)

    return put


def _count_again(optimizer: Any) -> None:
    """DeepSpeed's Adam for the host keeps powers of its betas, multiplied step by step, and no checkpoint has them.

    Computed at once from the number of the step they differ in the last digit, and so would all that follows.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    group = optimizer.param_groups[0]
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    optimizer.ds_opt_adam.create_adam(optimizer.opt_id, *settings, optimizer.adam_w_mode, False)
    nothing = [torch.empty(0)] * 4
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *settings, group["bias_correction"], *nothing)


def _recut(engine: Any, shapes: Any, saved: int, own: str, torch_load: dict[str, Any]) -> dict[str, Any]:
    """This process's part of what `saved` processes have written. own: the name of the file that it would have."""
    rank = torch.distributed.get_rank(engine.optimizer.dp_process_group)

    def read_of(other: int) -> dict[str, Any]:
        name = Path(own).name.replace(f"zero_pp_rank_{rank}_", f"zero_pp_rank_{other}_")
        content: dict[str, Any] = _read(str(Path(own).with_name(name)), torch_load)
        return content

    return own_part(engine, shapes, saved, read_of)


def _read(path: str, torch_load: dict[str, Any]) -> Any:
    with torch.serialization.safe_globals(list(_CLASSES)):
        return read_torch(Path(path), **torch_load)


def _check(engine: Any, content: dict[str, Any], folder: Path) -> None:
    if bool(content["param_shapes"]) != engine.zero_optimization():
        ways = "a stage of ZeRO from 1 on" if content["param_shapes"] else "stage 0"
        raise CheckpointError(f"{folder} was saved with {ways}, but the other is used here: set the stage as it was.")
    if content["param_shapes"]:
        wanted, found = _flat(engine._get_zero_param_shapes()), _flat(content["param_shapes"])
    else:
        wanted, found = (
            {name: value.shape for name, value in weights.items()}
            for weights in (engine.module.state_dict(), content["module"])
        )
    if wanted != found:
        different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        shapes = [f"{name} {_shown(found.get(name))} for {_shown(wanted.get(name))}" for name in different[:5]]
        raise CheckpointError(
            f"The weights in {folder} are not those of this {type(engine.module).__name__}: {', '.join(shapes)}; "
            "create the model as it was when the checkpoint was saved."
        )


def _check_pieces(engine: Any, content: dict[str, Any], folder: Path, saved: int) -> None:
    """Whether the pieces of `saved` processes can be cut again: not where they are on a disk, or laid out otherwise."""
    if engine.zero_optimization_partition_weights() and content.get("frozen_param_fragments"):
        raise CheckpointError(
            f"{folder} was saved on {saved} processes, but there are {engine.seq_dp_world_size}: in stage 3, shards "
            "of frozen parameters can only be loaded by as many processes as wrote them; start that many, or "
            "convert it to full weights with its zero_to_fp32.py."
        )
    config = engine._config.zero_config
    offloads = (config.offload_optimizer, config.offload_param)
    on_a_disk = any(offload is not None and offload.device == "nvme" for offload in offloads)
    known = hasattr(engine.optimizer, "fp32_partitioned_groups_flat") or hasattr(
        engine.optimizer, "single_partition_of_fp32_groups"
    )
    if on_a_disk or not known or config.elastic_checkpoint:
        raise CheckpointError(
            f"{folder} was saved on {saved} processes, but there are {engine.seq_dp_world_size}: with this "
            f"DeepSpeed config (offloading to a disk, `elastic_checkpoint` or {type(engine.optimizer).__name__}) "
            "its shards can only be loaded by as many processes as wrote them; start that many, or convert it to "
            "full weights with its zero_to_fp32.py."
        )


def _flat(groups: list[dict[str, torch.Size]]) -> dict[str, torch.Size]:
    return {name: shape for group in groups for name, shape in group.items()}


def _shown(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(tuple(shape))
