"""What an Accelerator is made of: its settings, its parts, and the objects it has prepared."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate import precision, strategies
from accelerate.accelerator.facts import AcceleratorFacts
from accelerate.accelerator.first_backward import FirstBackward
from accelerate.accumulation import Accumulation, ItemWindows
from accelerate.config.accumulation import GradientAccumulationPlugin
from accelerate.config.data import DataLoaderConfiguration
from accelerate.config.dynamo import TorchDynamoPlugin
from accelerate.config.enums import DynamoBackend, RNGType
from accelerate.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from accelerate.config.preemption import preemption_settings
from accelerate.config.project import ProjectConfiguration
from accelerate.errors import NotYetSupported, WrongHandler, a_kind_of, check_flag, check_kind
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision import PrecisionSettings
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState

if TYPE_CHECKING:
    from accelerate.accelerator.nonfinite import StopAtNonfinite
    from accelerate.checkpoint.agreement import Background
    from accelerate.config.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
    from accelerate.config.fsdp import FullyShardedDataParallelPlugin
    from accelerate.config.parallel import TorchTensorParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state.stopping import Stopping

_NOT_GIVEN: Any = object()

# Which attribute holds the handler of each kind.
_HANDLERS: dict[type[KwargsHandler], str] = {
    DistributedDataParallelKwargs: "ddp_handler",
    GradScalerKwargs: "scaler_handler",
    InitProcessGroupKwargs: "init_handler",
    AutocastKwargs: "autocast_handler",
    ProfileKwargs: "profile_handler",
}
# The same for how a library computes in fp8, by the names of classes: few scripts need them.
_RECIPES = {
    "AORecipeKwargs": "ao_recipe_handler",
    "TERecipeKwargs": "te_recipe_handler",
    "MSAMPRecipeKwargs": "msamp_recipe_handler",
    "FP8RecipeKwargs": "fp8_recipe_handler",
}


class AcceleratorBase(AcceleratorFacts):
    """Settings and parts. The methods of the Accelerator are in the files beside this one, by what a user is doing."""

    # Again, for those checkers that look for the type of an attribute in the class that assigns it.
    state: AcceleratorState
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    dataloader_config: DataLoaderConfiguration
    log_with: list[Any]
    native_amp: bool
    ddp_handler: DistributedDataParallelKwargs | None
    scaler_handler: GradScalerKwargs | None
    init_handler: InitProcessGroupKwargs | None
    autocast_handler: AutocastKwargs | None
    profile_handler: ProfileKwargs | None
    ao_recipe_handler: AORecipeKwargs | None
    te_recipe_handler: TERecipeKwargs | None
    msamp_recipe_handler: MSAMPRecipeKwargs | None
    fp8_recipe_handler: FP8RecipeKwargs | None

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _NOT_GIVEN,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        preemption: str | None = None,
        nonfinite: str | None = None,
    ) -> None:
        _check_settings(kwargs_handlers, rng_types, dataloader_config)
        check_flag("device_placement", device_placement)
        check_flag("split_batches", split_batches)
        check_flag("cpu", cpu)
        check_flag("step_scheduler_with_optimizer", step_scheduler_with_optimizer)
        check_kind("project_config", project_config, ProjectConfiguration, ", or only a folder as `project_dir`")
        check_kind("gradient_accumulation_plugin", gradient_accumulation_plugin, GradientAccumulationPlugin)
        accumulation = _accumulation_plugin(gradient_accumulation_steps, gradient_accumulation_plugin)
        if nonfinite not in (None, "skip", "stop"):
            raise ValueError(f"nonfinite is {nonfinite!r}: pass 'skip' or 'stop', or leave it out.")
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self._preemption, self._resume = preemption_settings(preemption, self.project_configuration)
        self._loaded_from: Path | None = None  # the last checkpoint
        self._untold_load: Path | None = None  # the same, until trackers know
        self._resume_is_due = self._resume is not None  # the launch says so, and the script has loaded nothing yet
        self._take_handlers(kwargs_handlers or [])
        if deepspeed_plugin is not None and deepspeed_plugins is not None:
            raise ValueError(
                "Pass either `deepspeed_plugin` or `deepspeed_plugins`, not both: they mean the same thing."
            )
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise ValueError("Pass either `dynamo_plugin` or `dynamo_backend`, not both.")
        with AcceleratorState._forgotten_if_refused():
            self.state = AcceleratorState(
                mixed_precision=mixed_precision,
                cpu=cpu,
                dynamo_plugin=TorchDynamoPlugin(backend=dynamo_backend)
                if dynamo_backend is not None
                else dynamo_plugin,
                deepspeed_plugin=deepspeed_plugins if deepspeed_plugin is None else deepspeed_plugin,
                fsdp_plugin=fsdp_plugin,
                torch_tp_plugin=torch_tp_plugin,
                megatron_lm_plugin=megatron_lm_plugin,
                parallelism_config=parallelism_config,
                _from_accelerator=True,
                **(self.init_handler.to_kwargs() if self.init_handler is not None else {}),
            )
            recipe = self._recipe()
            self.log_with = self._asked_trackers(log_with)
            self._trackers_are_missing = bool(log_with) and not self.log_with  # which was said
            # Until the trackers are started, what is logged is lost. Scripts may start them on the main process alone.
            self._logs_are_lost = bool(self.log_with) and self.is_main_process
            self.device_placement = device_placement
            self.dataloader_config = dataloader_config or DataLoaderConfiguration()
            if split_batches is not _NOT_GIVEN:
                self.dataloader_config.split_batches = split_batches
            self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
            self.rng_types: list[Any] = ["generator"] if rng_types is None else rng_types

            self._strategy = strategies.create(self.state, self.ddp_handler)
            self._precision = precision.create(
                "no" if self._strategy.owns_precision else self.state.mixed_precision,
                self.state.device_kind,
                PrecisionSettings(
                    self.autocast_handler or AutocastKwargs(),
                    self.scaler_handler or GradScalerKwargs(),
                    self._strategy.scaler_kind,
                    recipe,
                ),
            )
            if self._strategy.places_models and not self._precision.can_be_sharded:
                raise NotYetSupported(
                    f"mixed_precision={self.state.mixed_precision!r} with {self.fp8_backend.value} and a sharded model",
                    "use torchao (pass AORecipeKwargs(), or launch with `--fp8_backend ao`), or DDP.",
                )
            self._strategy.precision = self._precision
            if nonfinite is not None and not self._strategy.can_leave_steps_out:
                raise ValueError(
                    f"nonfinite={nonfinite!r} does not work with {type(self._strategy).__name__}, which does not "
                    "show its gradients before a step: leave it out."
                )
            accumulation = self._strategy.accumulation(accumulation)
        # Whether several processes have outputs for the same samples, so that some of them do not count.
        self._outputs_repeat = len(set(self._strategy.data_shares())) < self.num_processes
        self.native_amp = self._precision.casts
        self.scaler: torch.amp.GradScaler | None = self._precision.scaler

        self.gradient_state = GradientState.owned_by(self, accumulation)
        self._strategy.gradient_state = self.gradient_state
        self._strategy.accelerator = weakref.ref(self)
        self._strategy.backward = FirstBackward(self._strategy)  # type: ignore[method-assign]
        self._accumulation = Accumulation(self.gradient_state, self._strategy)
        self._items = ItemWindows(self._strategy)
        # What the windows are about, and for how many models and parameter groups that was found out.
        self._item_groups: tuple[tuple[int, ...], list[list[torch.Tensor]]] | None = None

        self._models: list[torch.nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self._save_model_state_pre_hook: OrderedDict[int, Any] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Any] = OrderedDict()
        self._files_looked_at: set[str] = set()
        self._saves_in: Path | None = None  # the folder of a project in which this run has saved before
        # What trackers have called after each step of the first optimizer.
        self._step_listeners: list[Callable[[], None]] = []
        self._skips_nonfinite = nonfinite is not None
        self._stops_at_nonfinite: StopAtNonfinite | None = None
        if nonfinite == "stop":
            from accelerate.accelerator.nonfinite import StopAtNonfinite

            self._stops_at_nonfinite = StopAtNonfinite(self)
        self._joining = False
        self._clips_early = False  # and was told so
        self._watches_forwards = False
        if self._preemption is not None:
            _ = self._stopping  # from now on a signal no longer ends the process by itself
        self.flag_tensor: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "_stopping"}
        return {**kept, "_stops_at_nonfinite": None}  # both are of this process alone

    @cached_property
    def _stopping(self) -> Stopping:
        from accelerate.state import stopping

        return stopping.current(self.state)

    @cached_property
    def _background(self) -> Background:
        from accelerate.checkpoint.agreement import Background

        return Background()

    def _asked_trackers(self, log_with: Any) -> list[Any]:
        if log_with is None:
            return []
        from accelerate.tracking import filter_trackers

        return filter_trackers(log_with, self.logging_dir)

    def _take_handlers(self, handlers: list[KwargsHandler]) -> None:
        for attribute in (*_HANDLERS.values(), *_RECIPES.values()):
            setattr(self, attribute, None)
        for handler in handlers:
            attribute = _HANDLERS.get(type(handler)) or _recipe_attribute(handler)
            if getattr(self, attribute) is not None:
                raise ValueError(f"kwargs_handlers contains two {type(handler).__name__}: pass one.")
            setattr(self, attribute, handler)

    def _recipe(self) -> KwargsHandler | None:
        """How to compute in fp8, if a handler says so."""
        given = [recipe for name in _RECIPES.values() if (recipe := getattr(self, name)) is not None]
        names = " and ".join(type(recipe).__name__ for recipe in given)
        if len(given) > 1:
            raise ValueError(
                f"kwargs_handlers contains {names}, but only one library can compute in fp8: pass one of them."
            )
        if given and self.state.mixed_precision != "fp8":
            raise ValueError(
                f"{names} is for mixed_precision='fp8', but mixed_precision is {self.state.mixed_precision!r}: pass "
                "mixed_precision='fp8', or leave the handler out."
            )
        return given[0] if given else None


def _check_settings(kwargs_handlers: Any, rng_types: Any, dataloader_config: Any) -> None:
    """Say what is of the wrong kind here, before it fails somewhere else."""
    if isinstance(dataloader_config, dict):  # any object that has the settings will do, as in the release
        check_kind("dataloader_config", dataloader_config, DataLoaderConfiguration)
    if isinstance(kwargs_handlers, KwargsHandler):
        name = type(kwargs_handlers).__name__
        raise TypeError(f"kwargs_handlers is a {name}: pass a list, `kwargs_handlers=[{name}(...)]`.")
    if isinstance(rng_types, str):
        raise TypeError(f"rng_types is {rng_types!r}: pass a list, `rng_types=[{rng_types!r}]`.")
    for name in rng_types or ():
        if name not in RNGType:
            from accelerate.text import did_you_mean

            known = RNGType.list()
            near = did_you_mean(str(name), known)
            raise ValueError(f"rng_types contains {name!r}{near}: choose from {', '.join(map(repr, known))}.")


def _accumulation_plugin(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    if plugin is not None:
        if steps != 1:
            raise ValueError("Pass either `gradient_accumulation_steps` or a GradientAccumulationPlugin, not both.")
        if isinstance(plugin.num_steps, int) and plugin.num_steps < 1:
            raise ValueError(f"GradientAccumulationPlugin has num_steps={plugin.num_steps}: it must be at least 1.")
        return plugin
    # The variable comes from the launcher, where a person has asked for it: it wins over the script.
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    asked: Any = os.environ.get(variable, steps)
    if asked == "auto":  # what a launch with DeepSpeed says for "as the script does"
        asked = steps
    try:
        steps = int(str(asked))
    except ValueError:
        name = variable if variable in os.environ else "gradient_accumulation_steps"
        raise ValueError(f"{name} is {asked!r}: give a whole number.") from None
    if steps < 1:
        raise ValueError(f"gradient_accumulation_steps is {steps}: it must be at least 1.")
    return GradientAccumulationPlugin(num_steps=steps)


def _recipe_attribute(handler: KwargsHandler) -> str:
    from accelerate.config.fp8 import Recipe

    name = type(handler).__name__
    if isinstance(handler, Recipe) and name in _RECIPES:
        return _RECIPES[name]
    if isinstance(handler, type) and issubclass(handler, KwargsHandler):
        raise WrongHandler(f"kwargs_handlers contains the class {handler.__name__}: pass `{handler.__name__}(...)`.")
    known = ", ".join((*(kind.__name__ for kind in _HANDLERS), *_RECIPES))
    raise WrongHandler(f"kwargs_handlers cannot contain {a_kind_of(handler)}: pass any of {known}.")
