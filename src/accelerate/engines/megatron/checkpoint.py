"""What an engine of Megatron-LM puts into a checkpoint: the layout of Megatron-LM, by this package's writers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel

from accelerate.checkpoint.parts import File, Part
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.engines.megatron.engine import MegatronEngine
from accelerate.errors import CheckpointError, NotYetSupported
from accelerate.io import blocks
from accelerate.io.blocks import FileEntry
from accelerate.io.host_memory import HostMemory
from accelerate.io.safe_load import read_torch

LATEST = "latest_checkpointed_iteration.txt"
_FORMAT = 3.0  # of Megatron-LM: how queries, keys and values lie in one tensor


@dataclass
class _Text:
    name: str
    text: str

    def copied(self, memory: HostMemory) -> _Text:
        return self

    def write(self, folder: Path, group: Any = None) -> dict[str, FileEntry]:
        return {self.name: blocks.write_file(folder / self.name, [self.text.encode()])}


def _iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _own_folder() -> str:
    """Of the processes that have the same part of the model."""
    tensor, stage = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return f"mp_rank_{tensor:02d}"
    return f"mp_rank_{tensor:02d}_{stage:03d}"


def _model_names(engine: MegatronEngine) -> list[str]:
    count = len(engine.module)
    return ["model"] if count == 1 else [f"model{number}" for number in range(count)]


# --- writing ----------------------------------------------------------------------------------------------------


def parts(engine: MegatronEngine, *, main: bool) -> Iterator[Part]:
    """What this process writes. Called on all processes: copies of the model put their optimizers' shards together.

    main: whether this process writes what is the same on all.
    """
    folder = f"{_iteration_folder(engine.iteration)}/{_own_folder()}"
    writes = parallel_state.get_data_parallel_rank() == 0
    saves_optimizer = engine.optimizer is not None and not engine.plugin.no_save_optim and _has_state(engine.optimizer)
    shards = _shards(engine.optimizer) if saves_optimizer else None
    if writes:
        content: dict[str, Any] = {
            "checkpoint_version": _FORMAT,
            "iteration": engine.iteration,
            "consumed_train_samples": engine.consumed_train_samples,
            "rng_state": [_random_states()],
        }
        chunk: Any
        for name, chunk in zip(_model_names(engine), engine.chunks, strict=True):
            content[name] = chunk.state_dict_for_save_checkpoint()
        if saves_optimizer:
            content["optimizer"] = engine.optimizer.state_dict()
        if engine.scheduler is not None:
            content["opt_param_scheduler"] = engine.scheduler.state_dict()
        yield File(f"{folder}/model_optim_rng.pt", content)
        if shards is not None:
            yield File(f"{folder}/distrib_optim.pt", shards)
    if main:
        yield _Text(LATEST, str(engine.iteration))


def _has_state(optimizer: Any) -> bool:
    """Whether an optimizer has taken a step: before, Megatron-LM cannot put shards together."""
    return any(len(each.optimizer.state) > 0 for each in _inside(optimizer))


def _inside(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _shards(optimizer: Any) -> Any:
    """The states of an optimizer whose copies have shards of them: whole, on the first copy."""
    found = [each.get_parameter_state_dp_zero() for each in _inside(optimizer) if _is_distributed(each)]
    return None if not found else found[0] if len(found) == 1 else found


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "get_parameter_state_dp_zero")


def _random_states() -> dict[str, Any]:
    """Under the names of Megatron-LM. Ours are beside them, for every process."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": tensor_parallel.get_cuda_rng_tracker().get_states().get("default"),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


# --- reading ----------------------------------------------------------------------------------------------------


def read(engine: MegatronEngine, reader: CheckpointReader, torch_load: dict[str, Any]) -> Callable[[], None]:
    """Read this process's part and see that it fits; returns what puts it into the engine."""
    folder = _folder_of(reader)
    name = f"{folder}/{_own_folder()}/model_optim_rng.pt"
    _check_parts(reader, folder)
    content = read_torch(reader.path(name), **torch_load)
    for model, chunk in zip(_model_names(engine), engine.chunks, strict=True):
        _check_weights(chunk, content.get(model), reader.folder / name)
    loads_optimizer = engine.optimizer is not None and not engine.plugin.no_load_optim and "optimizer" in content
    shards = None
    if loads_optimizer and any(map(_is_distributed, _inside(engine.optimizer))):
        path = f"{folder}/{_own_folder()}/distrib_optim.pt"
        if not reader.has(path):
            raise CheckpointError(
                f"{reader.folder} was saved without `use_distributed_optimizer`, but it is set here: set it as it "
                "was, or load only the weights with no_load_optim=True."
            )
        if parallel_state.get_data_parallel_rank() == 0:
            shards = read_torch(reader.path(path), **torch_load)

    @torch.no_grad()
    def put() -> None:
        for model, chunk in zip(_model_names(engine), engine.chunks, strict=True):
            chunk.load_state_dict(content[model])
        if loads_optimizer:
            _load_optimizer(engine.optimizer, content["optimizer"], shards)
        elif engine.optimizer is not None:
            engine.optimizer.reload_model_params()
        if engine.scheduler is not None and "opt_param_scheduler" in content:
            engine.scheduler.num_steps = 0  # it adds those that it loads
            engine.scheduler.load_state_dict(content["opt_param_scheduler"])
        engine.iteration = content["iteration"]
        engine.consumed_train_samples = content.get("consumed_train_samples", 0)
        states = content.get("rng_state")
        if states and states[0].get("rng_tracker_states"):
            tensor_parallel.get_cuda_rng_tracker().set_states(states[0]["rng_tracker_states"])

    return put


def _folder_of(reader: CheckpointReader) -> str:
    if not reader.has(LATEST):
        raise CheckpointError(
            f"{reader.folder} is not a checkpoint of Megatron-LM (it has no {LATEST}): load one that was saved with "
            "it, or load full weights into the model before `prepare`."
        )
    text = reader.path(LATEST).read_text().strip()
    if not text.isdigit():
        raise CheckpointError(
            f"{reader.folder / LATEST} holds {text[:40]!r} and not the number of an iteration: load another checkpoint."
        )
    return _iteration_folder(int(text))


def _check_parts(reader: CheckpointReader, folder: str) -> None:
    """Whether the model was saved in as many parts as it has here."""
    found = [
        re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.name) for path in (reader.folder / folder).glob("mp_rank_*")
    ]
    places = [(int(match[1]), int(match[2] or 0)) for match in found if match]
    saved = tuple(max((place[axis] for place in places), default=-1) + 1 for axis in (0, 1))
    here = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if saved != here:
        raise CheckpointError(
            f"{reader.folder / folder} was saved with tp_degree={saved[0]} and pp_degree={saved[1]}, but here they "
            f"are {here[0]} and {here[1]}: set them as they were, or transfer the weights with `save_model`."
        )


def _check_weights(chunk: Any, saved: Any, path: Path) -> None:
    own = {name: value for name, value in chunk.state_dict_for_save_checkpoint().items() if _is_weight(value)}
    saved = {name: value for name, value in (saved or {}).items() if _is_weight(value)}
    wanted = {name: tuple(value.shape) for name, value in own.items()}
    found = {name: tuple(value.shape) for name, value in saved.items()}
    if wanted != found:
        different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        shapes = [f"{name} {found.get(name, 'nothing')} for {wanted.get(name, 'nothing')}" for name in different[:5]]
        raise CheckpointError(
            f"The weights in {path} are not those of this {type(chunk).__name__}: {', '.join(shapes)}; create the "
            "model as it was when the checkpoint was saved."
        )


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _load_optimizer(optimizer: Any, state: Any, shards: Any) -> None:
    optimizer.load_state_dict(state)
    distributed = [each for each in _inside(optimizer) if _is_distributed(each)]
    for number, each in enumerate(distributed):
        with _steps_aside(each.optimizer):
            each.load_parameter_state_from_dp_zero(shards[number] if len(distributed) > 1 and shards else shards)


@contextmanager
def _steps_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """torch's own optimizers count steps for each parameter: Megatron-LM takes the count for a tensor of its shards,
    and leaves the same one to all of them."""
    steps = {parameter: state.pop("step") for parameter, state in optimizer.state.items() if "step" in state}
    yield
    for parameter, step in steps.items():
        optimizer.state[parameter]["step"] = step.clone()


# --- whole weights ----------------------------------------------------------------------------------------------


def whole_weights(engine: MegatronEngine) -> dict[str, Any]:
    """The weights of the whole model, with the names that transformers gives them, on the first process.

    Called on all processes; the others get nothing. A model of a script's own keeps its names, where it is in one part.
    """
    if engine.model_config is not None:
        from accelerate.engines.megatron.weights import transformers_state_dict

        return transformers_state_dict(engine.chunks, engine.model_config) or {}
    if parallel_state.get_model_parallel_world_size() > 1 or len(engine.chunks) > 1:
        raise NotYetSupported(
            "gathering the weights of a `custom_model_provider_function` from several processes",
            "save them with `save_state`, which writes a file for each part.",
        )
    return {name: value for name, value in engine.chunks[0].state_dict().items() if _is_weight(value)}
