"""How a model is spread over processes, and who takes its steps. The base class is the plain case: one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accelerate.bundle import Bundle
from accelerate.compilation import compile_regions
from accelerate.config.accumulation import GradientAccumulationPlugin
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallel.mesh import SAME_DATA, axis_rank, shares_of_ranks
from accelerate.precision import Precision, Scaler
from accelerate.precision.stepping import Stepper
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.torch_internals.tensors import change_mark, multiply_
from accelerate.unwrap import extract_model_from_parallel

if TYPE_CHECKING:
    from accelerate.checkpoint.model_weights import Fetch
    from accelerate.checkpoint.parts import Part
    from accelerate.checkpoint.reader import CheckpointReader
    from accelerate.checkpoint.run_state import Run, StagedLoad


class Outputs(NamedTuple):
    """Which of this process's outputs count when those of all processes are gathered for a metric.

    samples: what it has for each sample. values: what it has for the batch as a whole, a loss for one.
    """

    samples: bool = True
    values: bool = True


class Strategy:
    """One engine. What an engine does in its own way is overridden in that engine's file.

    An engine that takes over the whole step overrides `prepare`, `backward`, `stepper`, and says below what it owns;
    `WholeStepStrategy` has the usual answers of those that make a new model and optimizer.
    """

    # Whether the engine puts models on the device itself, shard by shard.
    places_models = False
    # Whether the engine casts and scales by itself, so that `mixed_precision` is for it alone.
    owns_precision = False
    # Whether the engine keeps the micro-batches of a window itself: it is stepped at each of them, and its checkpoints
    # hold the gradients of an open window.
    owns_accumulation = False
    # Whether the engine divides losses by the accumulation steps.
    divides_loss = False
    # Whether every process has to call a model equally often.
    needs_even_batches = False
    # Whether the main process has all models and optimizers, and can save them when the others do not take part.
    saves_alone = True
    # Whether models and optimizers can be copied aside, to be written while training goes on.
    can_copy_aside = True
    # Whether `save` takes arguments that a script adds to `save_state`.
    takes_save_arguments = False
    # Whether optimizers have the parameters of the prepared models, and not others that the engine puts in their place.
    keeps_parameters = True
    # Whether the gradients of a step can be looked at before it, and the step left out.
    can_leave_steps_out = True
    # What a script gets for its optimizer.
    optimizer_wrapper: type[AcceleratedOptimizer] = AcceleratedOptimizer
    # The scaler of fp16 training.
    scaler_kind: type[Scaler] = Scaler
    # The engine's own classes around a model, which have it as `module`: models are found in them everywhere.
    wrappers: tuple[type, ...] = ()
    # Of the Accelerator: whether this micro-batch is the last of its window, and how many make one.
    gradient_state: GradientState
    # How its numbers are cast.
    precision: Precision
    # Whose strategy it is, for functions of scripts that take an Accelerator; None in another process.
    accelerator: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        self.state = state
        self.device: torch.device = state.device
        self.ddp = ddp

    def __getstate__(self) -> dict[str, Any]:
        # Without the Accelerator that it belongs to, and what looks at the first backward of that one.
        return {name: value for name, value in self.__dict__.items() if name not in ("accelerator", "backward")}

    # --- preparing ----------------------------------------------------------------------------------------------

    def prepare(self, bundle: Bundle) -> None:
        """Make the objects of one call of `prepare` those of this engine, by replacing the values of their entries.

        Models lie on the device, unless the engine places them, and compute in their precision. Loaders are prepared
        already. Optimizers and schedulers get the wrappers that scripts see afterwards.
        """
        for model in bundle.models:
            if not model.evaluation:
                model.value = self.wrap(model.value, placed=model.placed)
        for optimizer in bundle.every_optimizer():
            self.rebind(optimizer)

    def loader(self, loader: Any, prepare: Callable[[Any], Any]) -> Any:
        """A loader of the script, prepared. prepare: does that for a plain `DataLoader`, which an engine may make."""
        return prepare(loader)

    def cut_sequences(self, loader: Any) -> Any:
        """A prepared loader that gives each process its part of every sequence, for processes that share those."""
        raise ValueError(
            "No processes split sequences with DeepSpeed here: pass a `deepspeed_plugin` and "
            "`parallelism_config=ParallelismConfig(sp_size=...)`, or leave the loader as it is."
        )

    def wrap(self, model: torch.nn.Module, *, placed: bool) -> torch.nn.Module:
        """The model in whatever container the engine needs. placed: whether it lies on `device` as a whole."""
        return model

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the parameters that the engine has put in place of those it was made for."""

    def has_replaced(self, parameter: torch.Tensor) -> bool:
        """Whether the engine has put another parameter in the place of this one."""
        return False

    def unwrap(self, model: torch.nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model from under the wrappers."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def compile(self, model: torch.nn.Module, *, regional: bool, **kwargs: Any) -> torch.nn.Module:
        """The prepared model compiled, as a whole or block by block. kwargs: for `torch.compile`."""
        compiled: Any = self.compile_regions(model, **kwargs) if regional else torch.compile(model, **kwargs)
        return compiled

    def compile_regions(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        """The model with its repeated blocks compiled. kwargs: for `torch.compile`."""
        return compile_regions(model, **kwargs)

    def free_memory(self) -> None:
        """Let go of everything that was prepared."""

    def accumulation(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        """How gradients are accumulated, where settings of the engine have a say in it."""
        return plugin

    def engine_scheduler(self, scheduler: Any, optimizers: list[Any]) -> AcceleratedScheduler | None:
        """What a script gets for a scheduler that the engine steps itself; None where its optimizer's steps do that."""
        return None

    def engine_wrapped(self) -> Any:
        """The engine of the model that was prepared last, where one stands behind it."""
        return None

    # --- who gets which data ------------------------------------------------------------------------------------

    def data_shares(self) -> list[int]:
        """For every rank, which share of the data it gets: ranks that work on the same batch have the same number."""
        return shares_of_ranks(self.state.device_mesh, self.state.num_processes)

    def batches_of_a_step(self) -> int:
        """How many batches of a script's loader all ranks together work on at a time."""
        return max(self.data_shares()) + 1

    def outputs(self) -> Outputs:
        """Which of this process's outputs count: of ranks that work on the same samples, only those of one."""
        mesh = self.state.device_mesh
        # Along a sequence that is cut, a value of the whole batch, as a loss, is that of a piece.
        return Outputs(axis_rank(mesh, *SAME_DATA) == 0, axis_rank(mesh, "tp") == 0)

    # --- one step -----------------------------------------------------------------------------------------------

    def micro_batch(self, model: torch.nn.Module, *, sync: bool) -> AbstractContextManager[Any] | None:
        """A context for a forward and a backward, whose backward synchronizes gradients, or keeps them on this process.

        None where there is nothing to do.
        """
        return None

    @classmethod
    def sync_in_backward(cls, model: torch.nn.Module) -> AbstractContextManager[Any] | None:
        """A context in which the next backward synchronizes, although its forward ran without.

        None where this is not the model's engine.
        """
        return None

    def backward(self, loss: torch.Tensor, *, divide: bool = True, **kwargs: Any) -> None:
        """The backward of a loss, which is scaled already, and divided unless the engine `divides_loss`.

        divide: False for a sum over items, which such an engine must leave as it is. kwargs: for `Tensor.backward`.
        """
        loss.backward(**kwargs)

    def stepper(self, optimizer: Any, scaler: torch.amp.GradScaler | None) -> Stepper | None:
        """What steps a prepared optimizer, and knows whether a step was skipped. None: by itself, or by the scaler."""
        return None

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

    def nonfinite(self, parameters: list[torch.Tensor]) -> torch.Tensor | None:
        """Whether the norm of these parameters' gradients is not finite: 1 or 0 on the device, alike on all processes
        that have exchanged them. None without gradients."""
        gradients = [
            gradient if gradient.layout is torch.strided else gradient.coalesce().values()
            for gradient in self.gradients(parameters)
        ]
        if not gradients:
            return None
        return torch.nn.utils.get_total_norm(gradients).isfinite().logical_not().float()

    def complete_gradients(self, parameters: list[torch.Tensor]) -> None:
        """The gradients of a window are to be those of all processes by now: for engines that exchange them later."""

    def averaged_ranks(self) -> int:
        """What the engine divides the sum of all processes' gradients by."""
        return self.state.num_processes

    def scale_gradients(self, parameters: list[torch.Tensor], factor: float) -> None:
        """Multiply the gradients that these parameters have so far."""
        if gradients := self.gradients(parameters):
            multiply_(gradients, factor)

    def has_gradients(self, parameters: list[torch.Tensor]) -> bool:
        """Whether any of these parameters has a gradient that waits for a step."""
        return bool(self.gradients(parameters))

    def gradient_marks(self, parameters: list[torch.Tensor]) -> list[Any]:
        """Something that changes with every gradient of these parameters; nothing where they have none."""
        return [(id(gradient), change_mark(gradient)) for gradient in self.gradients(parameters)]

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a prepared model; unwrap: with the names it had before."""
        inner: torch.nn.Module = self.unwrap(model, keep_torch_compile=False) if unwrap else model
        return inner.state_dict()

    def stream_weights(self, model: torch.nn.Module) -> tuple[dict[str, Any], Fetch] | None:
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
        from accelerate.checkpoint import full_state

        return full_state.save(run, weights, safe=safe, main=main)

    def load(self, run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        """Read what `save` wrote and see that it fits, changing nothing; returns what puts it in place.

        Called on all processes. reader: reads files of `reader.folder` and compares their checksums. A file that the
        engine reads in another way is compared afterwards, before anything is put in place.
        torch_load: arguments for `torch.load`. kwargs: those of `load_state`; here for a model's `load_state_dict`.
        """
        from accelerate.checkpoint import full_state

        # The files have the names of the models inside, as `state_dict` gave them.
        inside = [self.unwrap(model, keep_torch_compile=False) for model in run.models_to_load]
        return full_state.load(replace(run, models_to_load=inside), reader, torch_load=torch_load, **kwargs)


class WholeStepStrategy(Strategy):
    """What engines have in common that own the whole step: they make a new model and optimizer, cast, step, and write
    their own files."""

    places_models = True
    owns_precision = True
    divides_loss = True
    needs_even_batches = True
    saves_alone = False
    keeps_parameters = False
    can_leave_steps_out = False

    def weights(self, models: list[torch.nn.Module]) -> list[dict[str, Any]]:
        return []  # the engine writes them itself
