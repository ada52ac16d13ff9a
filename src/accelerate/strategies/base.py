"""How a model is spread over processes. The base class is the plain case: one device, nothing to do."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate.checkpoint import whole
from accelerate.checkpoint.parts import Part, Put
from accelerate.checkpoint.reading import Reader
from accelerate.checkpoint.state import Run
from accelerate.checkpoint.weights import Fetch
from accelerate.compilation import compile_regions
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.precision import Scaler
from accelerate.unwrap import extract_model_from_parallel


class Strategy:
    """One engine. A method that an engine does in its own way is overridden in that engine's file."""

    # Whether the engine puts models on the device itself, piece by piece.
    places_models = False
    # Whether every process has to call a model equally often.
    needs_even_batches = False
    # Whether the main process has all models and optimizers, and can save them when the others do not take part.
    saves_alone = True
    # The scaler of fp16 training.
    scaler_kind: type[Scaler] = Scaler

    def __init__(self, device: torch.device, ddp: DistributedDataParallelKwargs) -> None:
        self.device = device
        self.ddp = ddp

    def wrap(self, model: torch.nn.Module, *, placed: bool) -> torch.nn.Module:
        """The model in whatever container the engine needs. placed: whether it lies on `device` as a whole."""
        return model

    def compile_regions(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        """The model with its repeated blocks compiled. kwargs: for `torch.compile`."""
        return compile_regions(model, **kwargs)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the parameters that the engine has put in place of those it was made for."""

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward passes keep their gradients to this process."""
        return nullcontext()

    def bypassed(self, models: list[torch.nn.Module]) -> set[int]:
        """The identities of parameters whose gradients, where there are any, cannot have come through the engine."""
        return set()

    def joinable(self, model: torch.nn.Module) -> bool:
        """Whether the engine can stand in for a process that has run out of data."""
        return False

    def stand_in(self, model: torch.nn.Module) -> torch.Tensor | None:
        """Run a forward that takes part in the engine's collectives and whose backward adds nothing."""
        return None

    def gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this process holds of the gradients of these parameters, as plain tensors to be changed in place."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a prepared model; unwrap: with the names it had before."""
        inner: torch.nn.Module = extract_model_from_parallel(model, keep_torch_compile=False) if unwrap else model
        return inner.state_dict()

    def coming(self, model: torch.nn.Module) -> tuple[dict[str, Any], Fetch] | None:
        """Of a model in pieces: a description of its weights, each once, and how to put them together, some at a time.

        None where they are at hand, in `state_dict`.
        """
        return None

    # --- checkpoints: models, optimizers and gradients; all else in a checkpoint is the same for every engine ------

    def weights(self, models: list[torch.nn.Module]) -> list[dict[str, Any]]:
        """The weights of prepared models, for hooks of `save_state` to look at and to take out, and then for `save`.

        An engine that writes shards returns nothing here. Called on all processes.
        """
        return [self.state_dict(model) for model in models]

    def save(self, run: Run, weights: list[dict[str, Any]], *, safe: bool, main: bool, **kwargs: Any) -> Iterable[Part]:
        """What this process writes into a checkpoint. Nothing is written here: see `Part`.

        main: whether this process writes what is the same on all. kwargs: those of `save_state`, for engines with
        something to choose. An engine whose processes write together gives parts that do so, on every process, before
        any other part, and failing on all processes alike.
        """
        return whole.save(run, weights, safe=safe, main=main)

    def load(self, run: Run, reader: Reader, *, torch_load: dict[str, Any], **kwargs: Any) -> Put:
        """Read what `save` wrote and see that it fits, changing nothing; returns what puts it in place.

        Called on all processes. reader: reads files of `reader.folder` and compares their checksums. A file that the
        engine reads in another way is compared afterwards, before anything is put in place.
        torch_load: arguments for `torch.load`. kwargs: those of `load_state`; here for a model's `load_state_dict`.
        """
        return whole.load(run, reader, torch_load=torch_load, **kwargs)
