"""How much memory training takes, per rank and by how the model is spread; found without allocating any of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.torch_internals.fake_tensors import without_content
from accelerate.torch_internals.modules import parameters_of

# Bytes of state that an optimizer keeps for each parameter.
OPTIMIZERS = {"adam": 8, "sgd": 0}

# Weights, gradients and states stay in float32 under mixed precision; only the computing is in another format.
MASTER = 4


@dataclass(frozen=True)
class Workload:
    """One training step: numbers of parameters (in all, that are trained, in the largest layer) and activations."""

    parameters: int
    trained: int
    largest_layer: int
    activations: int  # bytes on one rank
    weight_copies: int = 0  # bytes of weights in the format of the computing, beside those in float32
    state_bytes: int = OPTIMIZERS["adam"]
    compute_bytes: int = 4  # of one number while computing


@dataclass(frozen=True)
class Usage:
    """Bytes on the device of one rank, and on the host for it."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    at_work: int = 0  # weights as they are computed with: gathered from all ranks, or copied into another format
    activations: int = 0
    host: int = 0

    @property
    def device(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.at_work + self.activations


def usage(task: Workload, processes: int) -> dict[str, Usage]:
    """What one rank of `processes` needs, by the way the model is spread."""
    weights, gradients = task.parameters * MASTER, task.trained * MASTER
    states = task.trained * task.state_bytes
    # The layer at work and the next one, fetched ahead; and the gradients of the one at work.
    gathered = 3 * task.largest_layer * task.compute_bytes
    # DDP sends gradients from buckets, which hold them a second time.
    buckets = gradients if processes > 1 else 0
    return {
        "DDP" if processes > 1 else "one process": Usage(
            weights, gradients + buckets, states, task.weight_copies, task.activations
        ),
        "FSDP": Usage(weights // processes, gradients // processes, states // processes, gathered, task.activations),
        "FSDP with CPU offload": Usage(
            at_work=gathered, activations=task.activations, host=(weights + gradients + states) // processes
        ),
    }


def measure(model: nn.Module, run: Callable[[nn.Module], Any], mixed_precision: str) -> tuple[int, int]:
    """The bytes that a forward pass keeps for the backward pass: activations, and copies of weights.

    The pass is made with tensors that have a shape, a dtype and no content, so that a model of any size will do; what
    autograd saves is counted as it saves it, each memory once.

    model: may be on the `meta` device; its parameters are replaced by ones without content.
    run: calls it with a batch.
    mixed_precision: "no", "fp16" or "bf16".
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mixed_precision)
    everything = _saved(model, run, torch.float32, dtype)
    if dtype is None:
        return everything, 0
    # With weights that need no copy.
    activations = _saved(model, run, dtype, dtype)
    return activations, max(0, everything - activations)


def _saved(
    model: nn.Module, run: Callable[[nn.Module], Any], weights: torch.dtype, autocast: torch.dtype | None
) -> int:
    from torch.multiprocessing.reductions import StorageWeakRef

    saved: dict[Any, Any] = {}
    with without_content("estimating the activations of a model"):
        # On the CPU, not on `meta`: there torch takes another way through attention, which keeps more.
        _empty_parameters(model.train(), weights)
        own = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if StorageWeakRef(storage) not in own:
                saved[StorageWeakRef(storage)] = storage  # kept alive, so that no other takes its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                run(model)
    return sum(storage.nbytes() for storage in saved.values())


def _empty_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    replaced: dict[int, nn.Parameter] = {}  # one that has two names stays one
    for module in model.modules():
        parameters = parameters_of(module)
        for name, old in list(parameters.items()):
            if old is not None:
                if id(old) not in replaced:
                    kind = dtype if old.is_floating_point() else old.dtype
                    replaced[id(old)] = nn.Parameter(torch.empty(old.shape, dtype=kind), old.requires_grad)
                parameters[name] = replaced[id(old)]
