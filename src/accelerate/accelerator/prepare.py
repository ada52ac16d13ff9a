"""Preparing: from the objects of a plain script to those of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any, TypeVar, overload

import torch
from torch.optim.lr_scheduler import LRScheduler

from accelerate.accelerator.base import AcceleratorBase
from accelerate.bundle import Bundle, Entry, kind_of
from accelerate.compilation import has_compiled_regions, is_compiled_module
from accelerate.config.enums import DynamoBackend
from accelerate.config.environment import parse_flag_from_env
from accelerate.devices import Device
from accelerate.errors import WrongObject, a_kind_of, warn
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision.stepping import FiniteStepper, Stepper
from accelerate.scheduler import AcceleratedScheduler
from accelerate.strategies import Strategy

# The public method that prepares one object of a kind.
_METHODS = {"models": "prepare_model", "optimizers": "prepare_optimizer", "schedulers": "prepare_scheduler"}
# By kind: what it is called, and what an object of no known class has if it may be one.
_LOOKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "loaders": ("DataLoader", ("dataset",)),
    "models": ("model", ("modules",)),
    "optimizers": ("optimizer", ("step", "zero_grad")),
    "schedulers": ("scheduler", ("step",)),
}


# What is prepared is used as before, so it is declared as what it was; its wrapper passes on all the rest.
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
Model = TypeVar("Model", bound=torch.nn.Module)
Loader = TypeVar("Loader")


class Preparing(AcceleratorBase):
    @overload
    def prepare(self, a: A, /, *, device_placement: list[bool | None] | None = None) -> A: ...
    @overload
    def prepare(self, a: A, b: B, /, *, device_placement: list[bool | None] | None = None) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /, *, device_placement: list[bool | None] | None = None) -> tuple[A, B, C]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, /, *, device_placement: list[bool | None] | None = None
    ) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, /, *, device_placement: list[bool | None] | None = None
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, f: F, /, *, device_placement: list[bool | None] | None = None
    ) -> tuple[A, B, C, D, E, F]: ...
    @overload
    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any: ...
    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers for this rank, in any order and number.

        Args:
            args: the objects. Anything else, including None, is returned as it is.
            device_placement: for each object, whether to move it to the device; None leaves the choice to the
                Accelerator.

        Returns:
            The prepared objects in the order of the arguments; a single one is not put in a tuple. Use these in place
            of the originals.

        Example:
            ```python
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            ```
        """
        if device_placement is None:
            device_placement = [None] * len(args)
        elif len(device_placement) != len(args):
            raise ValueError(
                f"device_placement has {len(device_placement)} entries for {len(args)} objects: give one for each."
            )
        self._communicator.verify("prepare", None)
        bundle = Bundle()
        entries = [bundle.add(item, placement) for item, placement in zip(args, device_placement, strict=True)]
        for item in args:
            if isinstance(item, (list, tuple)):
                _warn_of_objects_inside(item, item, "")
            elif isinstance(item, dict):
                _warn_of_objects_inside(item, item.values(), ".values()")
            elif isinstance(item, GeneratorType):
                warn(
                    "`prepare` was given a generator and returns it unchanged: pass the model or the optimizer itself, "
                    "or a DataLoader."
                )
            elif isinstance(item, type):
                warn(
                    f"`prepare` was given the class {item.__name__} and returns it unchanged: pass an object, "
                    f"`{item.__name__}(...)`."
                )
            elif isinstance(item, torch.utils.data.Dataset) and not isinstance(item, torch.nn.Module):
                warn(
                    f"`prepare` was given a dataset, {a_kind_of(item)}, and returns it unchanged, so every process "
                    "reads all of it: pass a DataLoader of it."
                )
        self._call_overrides(bundle, "models")
        self._call_overrides(bundle, "optimizers")
        schedulers = _split_off(bundle.schedulers) if self._overrides("schedulers") else []
        self._prepare_bundle(bundle)
        for scheduler in schedulers:
            scheduler.value = self.prepare_scheduler(scheduler.value)
        prepared = [entry.value for entry in entries]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _overrides(self, kind: str) -> bool:
        """Whether somebody has put a method in place of ours for one kind of object."""
        name = _METHODS[kind]
        return getattr(getattr(self, name), "__func__", None) is not getattr(Preparing, name)

    def _call_overrides(self, bundle: Bundle, kind: str) -> None:
        """Have objects prepared by the method that a subclass has for their kind; it may call ours."""
        if self._overrides(kind):
            for entry in _split_off(getattr(bundle, kind)):
                entry.value = getattr(self, _METHODS[kind])(entry.value, device_placement=entry.placement)

    def _prepare_bundle(self, bundle: Bundle) -> None:
        """Prepare the objects of a bundle, in place; if that fails, none of them belongs to this Accelerator."""
        registers: list[list[Any]] = [self._models, self._optimizers, self._schedulers, self._dataloaders]
        earlier = list(map(len, registers))
        try:
            self._prepare_in_order(bundle)
        except BaseException:
            for register, count in zip(registers, earlier, strict=True):
                del register[count:]
            raise

    def _prepare_in_order(self, bundle: Bundle) -> None:
        """From what a script made to what this process trains, in place. The order of the kinds matters:

        models come first, since memory may run out; an engine may read the batch size off the prepared loaders;
        optimizers get the parameters of spread models; schedulers follow the optimizers, wherever these stood.
        """
        _set_aside(bundle.models, self._models, _is_prepared)
        _set_aside(bundle.optimizers, self._optimizers, lambda item: isinstance(item, AcceleratedOptimizer))
        _set_aside(bundle.schedulers, self._schedulers, lambda item: isinstance(item, AcceleratedScheduler))
        bundle.earlier_optimizers = [optimizer.optimizer for optimizer in self._optimizers]
        for model in bundle.models:
            self._place(model)
        for loader in bundle.loaders:
            ours = functools.partial(self.prepare_data_loader, device_placement=loader.placement)
            loader.value = self._strategy.loader(loader.value, ours)
        for optimizer in bundle.optimizers:
            _warn_of_offloaded(optimizer.value)
        if self.native_amp:
            self._precision.convert(bundle)
        acted = self._precision.acts_after_step
        self._strategy.prepare(bundle)
        if self._precision.acts_after_step and not acted:
            for earlier in self._optimizers:  # they may step a model that comes after them
                earlier.after_step += (functools.partial(self._precision.after_step, self._models),)
        for model in bundle.models:
            model.value = self._finish_model(model.value)
        for optimizer in bundle.optimizers:
            optimizer.value = self._wrap_optimizer(optimizer)
        for scheduler in bundle.schedulers:
            scheduler.value = self._wrap_scheduler(scheduler.value)

    def prepare_model(self, model: Model, device_placement: bool | None = None, evaluation_mode: bool = False) -> Model:
        """Prepare one model: move it to the device, apply mixed precision, and wrap it for the strategy in use.

        Args:
            model: the model.
            device_placement: whether to move it to the device. By default, what the Accelerator was created with.
            evaluation_mode: do not wrap it for gradient synchronization, because it is never trained.

        Returns:
            The prepared model.
        """
        prepared: Model = self._prepare_alone(model, "models", device_placement, evaluation=evaluation_mode)
        return prepared

    def _place(self, entry: Entry) -> None:
        """Put a model on the device, unless it lies where it belongs or its engine does that."""
        model: torch.nn.Module = entry.value
        spread = self.verify_device_map(model)
        if (
            spread
            and self.num_processes > 1
            and not entry.evaluation
            and not parse_flag_from_env("ACCELERATE_BYPASS_DEVICE_MAP")
        ):
            raise ValueError(
                "This model is spread over several devices (`device_map`), so it cannot also be trained on "
                f"{self.num_processes} processes: load it without `device_map`, start one process, or set "
                "ACCELERATE_BYPASS_DEVICE_MAP=true if each process has its own devices."
            )
        wanted = self.device_placement if entry.placement is None else entry.placement
        entry.placed = wanted and not spread and not _is_quantized(model)
        if entry.placed and (entry.evaluation or not self._strategy.places_models):
            entry.value = _moved(model, self.state.device_kind, self.device)

    def _finish_model(self, model: torch.nn.Module) -> torch.nn.Module:
        model = self._compile(model)
        if self._stops_at_nonfinite is not None:
            self._stops_at_nonfinite.note_forwards(model)
        if self._watches_forwards:
            from accelerate.accelerator.uneven import watch_forwards

            watch_forwards(self, model)
        mark(model)
        self._models.append(model)
        return model

    def _compile(self, model: torch.nn.Module) -> torch.nn.Module:
        plugin = self.state.dynamo_plugin
        if plugin is None or plugin.backend == DynamoBackend.NO or is_compiled_module(model):
            return model
        if has_compiled_regions(model):
            return model
        return self._strategy.compile(model, regional=bool(plugin.use_regional_compilation), **plugin.to_kwargs())

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer so that it follows gradient accumulation and the gradient scaler.

        Args:
            optimizer: the optimizer.
            device_placement: whether to move its state to the device. By default, what the Accelerator was created
                with.

        Returns:
            The wrapped optimizer.
        """
        prepared: AcceleratedOptimizer = self._prepare_alone(optimizer, "optimizers", device_placement)
        return prepared

    def _prepare_alone(self, item: Any, kind: str, device_placement: bool | None = None, **known: Any) -> Any:
        check_object(_METHODS[kind], item, kind)
        bundle = Bundle()
        entry = bundle.add(item, device_placement, kind=kind, **known)
        self._prepare_bundle(bundle)
        return entry.value

    def _wrap_optimizer(self, entry: Entry) -> AcceleratedOptimizer:
        optimizer = entry.value
        prepared = self._strategy.optimizer_wrapper(
            optimizer,
            device_placement=self.device_placement if entry.placement is None else entry.placement,
            scaler=self.scaler,
            stepper=self._strategy.stepper(optimizer, self.scaler) or self._finite_stepper(optimizer),
        )
        prepared.gradient_state = self.gradient_state
        prepared.every_micro_batch = self._strategy.owns_accumulation
        # Neither knows this Accelerator, which knows the optimizer: so it ends, with its loaders, when it is dropped.
        prepared.on_gradients_consumed = functools.partial(self._items.begin, len(self._optimizers))
        if self._precision.acts_after_step:
            prepared.after_step += (functools.partial(self._precision.after_step, self._models),)
        if self._stops_at_nonfinite is not None:
            prepared.after_step += (functools.partial(self._stops_at_nonfinite.after_step, prepared._stepper),)
        if not self._optimizers:
            prepared.after_step += tuple(self._step_listeners)
        if self._strategy.keeps_parameters:
            prepared._prepared_parameters = functools.partial(
                _prepared_parameters, self._models, self._strategy, self.num_processes
            )
        if self._precision.scaler is not None:
            self._precision.scaler.optimizers.append(optimizer)
        mark(prepared)
        self._optimizers.append(prepared)
        return prepared

    def _finite_stepper(self, optimizer: Any) -> Stepper | None:
        """Under fp16 the scaler leaves such steps out."""
        if not self._skips_nonfinite or (self.scaler is not None and self.scaler.is_enabled()):
            return None
        return FiniteStepper(optimizer, self._strategy.nonfinite)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler so that it steps when its optimizer does, once for each process.

        Args:
            scheduler: a scheduler of an optimizer that is, or will be, prepared.

        Returns:
            The wrapped scheduler.
        """
        prepared: AcceleratedScheduler = self._prepare_alone(scheduler, "schedulers")
        return prepared

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        prepared = self._strategy.engine_scheduler(scheduler, self._optimizers) or self._follower(scheduler)
        mark(prepared)
        self._schedulers.append(prepared)
        return prepared

    def _follower(self, scheduler: Any) -> AcceleratedScheduler:
        """What steps a scheduler after its optimizers."""
        wrapped = getattr(scheduler, "optimizer", None)
        own = [optimizer for optimizer in self._optimizers if wrapped in (optimizer, optimizer.optimizer)]
        prepared = AcceleratedScheduler(
            scheduler,
            own or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        each = 1 if self.split_batches else self._strategy.batches_of_a_step()
        prepared._move_by(each)
        prepared.gradient_state = self.gradient_state
        prepared._watch_epochs()
        if prepared._horizon and self.step_scheduler_with_optimizer:
            from accelerate.accelerator import loaders

            if loaders.says_horizon(self, prepared._horizon, each):
                prepared._horizon = None  # it is not said again when the schedule has ended
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Loader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Loader:
        """Give this rank its share of a loader's data, and put its batches on the device.

        Args:
            data_loader: the loader.
            device_placement: whether to move batches to the device. By default, what the Accelerator was created with.
            slice_fn_for_dispatch: a function `(batch, slice, process_index, num_processes)` that cuts a batch which
                rank 0 hands out. By default every tensor is sliced along its first dimension.

        Returns:
            The prepared loader.
        """
        from accelerate.accelerator import loaders

        ready: Loader = loaders.prepare(self, data_loader, device_placement, slice_fn_for_dispatch)
        return ready

    def skip_first_batches(self, dataloader: Loader, num_batches: int = 0) -> Loader:
        """Return a loader for this epoch only that starts after the first batches.

        Args:
            dataloader: a prepared loader, or any other `DataLoader`.
            num_batches: how many batches to skip. They are not fetched where the loader has a sampler.

        Returns:
            A loader over the remaining batches. Use the original loader again in the next epoch.
        """
        from accelerate.data_loader import skip_first_batches

        rest: Loader = skip_first_batches(dataloader, num_batches=num_batches)
        return rest

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Tell whether a device map has spread a model over several devices.

        Args:
            model: any model.

        Returns:
            True if one of its modules has an `hf_device_map` with more than one device.
        """
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    def free_memory(self, *objects: Any) -> list[None]:
        """Release everything that was prepared, and empty the device's cache.

        Args:
            objects: variables of the script that hold prepared objects.

        Returns:
            One None per object, to overwrite the variables with.

        Example:
            ```python
            model, optimizer = accelerator.free_memory(model, optimizer)
            ```
        """
        from accelerate.memory import release_memory

        self._schedulers.clear()
        self._optimizers.clear()
        self._models.clear()
        self._dataloaders.clear()
        self._strategy.free_memory()
        self._accumulation.reset()
        self._items.reset()
        self._item_groups = None
        if self._stops_at_nonfinite is not None:
            self._stops_at_nonfinite.forget()
        if self._precision.scaler is not None:
            self._precision.scaler.optimizers.clear()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """Release everything that was prepared: the same as `free_memory`.

        Args:
            objects: variables of the script that hold prepared objects.

        Returns:
            One None per object, to overwrite the variables with.
        """
        return self.free_memory(*objects)


def _prepared_parameters(
    models: list[torch.nn.Module], strategy: Strategy, processes: int
) -> tuple[set[int], set[int]]:
    """The identities of all parameters of prepared models, and of those whose model was not called as prepared.

    Nothing where it makes no difference.
    """
    if not models and processes == 1:
        return set(), set()
    known = {id(parameter) for model in models for parameter in model.parameters()} or {0}
    return known, strategy.bypassed(models) if processes > 1 else set()


def check_object(method: str, item: Any, kind: str) -> None:
    """Refuse what is of another kind, or cannot be of this one. method: what it was passed to."""
    name, needed = _LOOKS[kind]
    found = kind_of(item)
    if found != kind and (found is not None or not all(hasattr(item, attribute) for attribute in needed)):
        raise WrongObject(f"`{method}` takes one {name}, and was given {a_kind_of(item)}: pass the {name} itself.")


def _warn_of_objects_inside(container: Any, items: Iterable[Any], taken_by: str) -> None:
    """`prepare` returns lists and dicts unchanged, and what is in them is then used as it was."""
    missed = [a_kind_of(item) for item in items if kind_of(item) is not None and not _is_prepared(item)]
    if missed:
        kind = type(container).__name__
        warn(
            f"`prepare` was given a {kind} that holds {' and '.join(missed)} and returns it unchanged: pass the "
            f"objects one by one, as in `prepare(*{kind}_of_objects{taken_by})`."
        )


def _moved(model: torch.nn.Module, kind: Device, device: torch.device) -> torch.nn.Module:
    try:
        return kind.place(model, device)
    except NotImplementedError:
        # torch advises `to_empty` here, after which whatever was in memory would be trained.
        parameters = list(model.parameters())
        empty = sum(parameter.is_meta for parameter in parameters)
        if not empty:
            raise
    raise ValueError(
        f"{empty} of the {len(parameters)} parameters of this {type(model).__name__} have no values (they are on "
        "the meta device): load its weights first, or build it outside `init_empty_weights`."
    )


def _warn_of_offloaded(optimizer: torch.optim.Optimizer) -> None:
    """Gradients go to the tensors that are brought in for a forward, and with them."""
    groups = getattr(optimizer, "param_groups", ())  # a stand-in for the optimizer of an engine has none
    empty = [value for group in groups for value in group["params"] if value.is_meta]
    if not empty:
        return
    from accelerate.offload.placeholder import OffloadedParameter

    offloaded = sum(isinstance(value, OffloadedParameter) and value.requires_grad for value in empty)
    if offloaded:
        warn(
            f"This {type(optimizer).__name__} has {offloaded} parameters that are offloaded, so they get no "
            "gradients and are not trained: keep the parameters you train on a device, and call "
            "requires_grad_(False) on the rest."
        )


def _set_aside(entries: list[Entry], prepared: list[Any], is_prepared: Callable[[Any], bool]) -> None:
    """Leave out what was prepared before; it is taken up where another Accelerator, or the script, has prepared it."""
    for entry in _split_off(entries):
        if not is_prepared(entry.value):
            entries.append(entry)
        elif not any(entry.value is item for item in prepared):
            prepared.append(entry.value)


def _split_off(entries: list[Entry]) -> list[Entry]:
    """All entries, of a list that has none afterwards."""
    taken, entries[:] = list(entries), []
    return taken


def _is_prepared(item: Any) -> bool:
    return bool(getattr(item, "_is_accelerate_prepared", False))


def mark(item: Any) -> None:
    item._is_accelerate_prepared = True


def _is_quantized(model: torch.nn.Module) -> bool:
    """bitsandbytes models lie where they were loaded, and refuse to be moved."""
    return bool(getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False))
