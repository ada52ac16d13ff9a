"""DeepSpeed: model, optimizer and scheduler become one engine, which shards what its stage of ZeRO says."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime import lr_schedules
from torch import nn

from accelerate.bundle import Bundle, Entry
from accelerate.checkpoint import layout
from accelerate.checkpoint.model_weights import Fetch, clean_state_dict_for_safetensors
from accelerate.checkpoint.parts import File, Part
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import Run, StagedLoad
from accelerate.compilation import compile_regions_deepspeed
from accelerate.config.accumulation import GradientAccumulationPlugin
from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.engines.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    EngineStepper,
    undo_first_step,
)
from accelerate.errors import NotYetSupported, warn
from accelerate.precision.stepping import Stepper
from accelerate.state import AcceleratorState
from accelerate.strategies import deepspeed_checkpoint
from accelerate.strategies import deepspeed_checks as checks
from accelerate.strategies import deepspeed_pieces as pieces
from accelerate.strategies.base import WholeStepStrategy
from accelerate.strategies.deepspeed_plan import Plan, plans, settle
from accelerate.strategies.deepspeed_settings import open_again
from accelerate.torch_internals.optimizers import call_stepped

logger = logging.getLogger(__name__)

# DeepSpeed's own schedulers are of no class of torch's.
for _name in lr_schedules.VALID_LR_SCHEDULES:
    getattr(lr_schedules, _name)._accelerate_kind = "schedulers"

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeed(WholeStepStrategy):
    optimizer_wrapper = DeepSpeedOptimizerWrapper
    wrappers = (deepspeed.DeepSpeedEngine,)
    takes_save_arguments = True

    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        used = get_accelerator().device_name()
        if used != self.device.type:
            raise RuntimeError(
                f"DeepSpeed has chosen the device {used!r}, but this process is on {self.device.type!r}: set "
                f"DS_ACCELERATOR={self.device.type} before anything imports deepspeed."
            )
        in_fp16 = any(plugin.mixed_precision == "fp16" for plugin in state.deepspeed_plugins.values())
        if in_fp16 and not get_accelerator().is_fp16_supported():
            raise ValueError(f"DeepSpeed has no fp16 on this {self.device.type}: use mixed_precision='bf16', or 'no'.")
        # Those with an optimizer.
        self.steppers: list[EngineStepper] = []
        # By the identities of parameters, those of models and those that optimizers have in their place.
        self.owners: dict[int, EngineStepper] = {}
        # The batch sizes of the script's loaders.
        self.batch_sizes: list[int | None] = []
        self.last_engine: Any = None
        # How processes share sequences, once a model does.
        self.sharing: Any = None
        # The optimizers that a script has made, whose groups its schedulers know, with their engines.
        self.replaced: list[tuple[torch.optim.Optimizer, Any]] = []

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The plugin in use."""
        plugin = self.state.deepspeed_plugin
        assert plugin is not None
        return plugin

    def accumulation(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        return dataclasses.replace(plugin, num_steps=self._accumulation_steps(plugin.num_steps))

    def _accumulation_steps(self, given: int | None) -> Any:
        """What the config of the plugin in use says, where it says anything. given: to the Accelerator."""
        steps = self.plugin.get_value("gradient_accumulation_steps")
        if steps in (None, "auto", given):
            return given
        if given not in (None, 1):
            warn(
                f"The DeepSpeed config says gradient_accumulation_steps={steps}, but the Accelerator was given "
                f"{given}: the config takes precedence; write 'auto' there to use the Accelerator's."
            )
        return steps

    # --- preparing ----------------------------------------------------------------------------------------------

    def loader(self, loader: Any, prepare: Callable[[Any], Any]) -> Any:
        size = getattr(loader, "batch_size", None)
        self.batch_sizes.append(getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or size)
        return prepare(loader)

    def data_shares(self) -> list[int]:
        # Processes that share sequences read different ones, and give each other parts of them.
        return list(range(self.state.num_processes)) if self._cuts_sequences() else super().data_shares()

    def batches_of_a_step(self) -> int:
        return max(super().data_shares()) + 1

    def _cuts_sequences(self) -> bool:
        config = self.state.parallelism_config
        return config is not None and config.sp_enabled

    def cut_sequences(self, loader: Any) -> Any:
        if not self._cuts_sequences():
            return super().cut_sequences(loader)
        if self.sharing is None:
            raise RuntimeError(
                "No model splits its sequences yet: prepare the model before `deepspeed_ulysses_dl_adapter`."
            )
        from accelerate.strategies.deepspeed_sequence import SequenceLoader

        return loader if isinstance(loader, SequenceLoader) else SequenceLoader(loader, self.device)

    def prepare(self, bundle: Bundle) -> None:
        found = plans(bundle)
        # Of a model that is not trained, nothing would be sharded in other stages.
        sharded = self.plugin.get_value("zero_optimization.stage") == 3
        engines = [plan for plan in found if plan.optimizer is not None or sharded]
        if any(plan.optimizer is not None for plan in engines):
            self._follow_config()
        run = {
            "batch_sizes": self.batch_sizes[-len(bundle.loaders) :] if bundle.loaders else self.batch_sizes,
            "processes": len(set(super().data_shares())),
            "split_batches": self.accelerator().split_batches,
            "accumulation_steps": self.accelerator().gradient_accumulation_steps,
        }
        if self._cuts_sequences() and len(engines) + (self.sharing is not None) > 1:
            raise NotYetSupported("A second model with sp_size", "train one model with it, and others without.")
        for plan in engines:
            settle(plan, self.plugin, **run)
        for plan in found:
            if plan in engines:
                self._make_engine(plan)
            else:
                self._place(plan.model)
        if found and self.sharing is not None:
            for loader in bundle.loaders:
                loader.value = self.cut_sequences(loader.value)

    def _follow_config(self) -> None:
        """A number in the config of the plugin in use counts for the loop, which has one for all its engines."""
        accelerator = self.accelerator()
        open_again(self.plugin)
        now = accelerator.gradient_accumulation_steps
        steps = self.plugin.get_value("gradient_accumulation_steps")
        if self.steppers and steps not in (None, "auto", now):
            name = next(name for name, plugin in self.state.deepspeed_plugins.items() if plugin is self.plugin)
            raise ValueError(
                f"The DeepSpeed plugin {name!r} says gradient_accumulation_steps={steps}, but the engines that were "
                f"prepared before accumulate {now}: a loop has one number, so make them the same, or write 'auto'."
            )
        if (chosen := self._accumulation_steps(now)) != now:
            accelerator.gradient_accumulation_steps = chosen

    def _share_sequences(self, model: nn.Module) -> Any:
        try:
            from accelerate.strategies.deepspeed_sequence import attend_together
        except ImportError as error:
            raise ImportError(
                f"This DeepSpeed cannot split sequences ({error}): pip install --upgrade deepspeed transformers"
            ) from error
        size = self.plugin.get_value("train_micro_batch_size_per_gpu")
        config = self.state.parallelism_config
        assert config is not None
        self.sharing = attend_together(model, config, size)
        return self.sharing.groups

    def _place(self, model: Entry) -> None:
        """A model without an engine."""
        model.value = model.value.to(self.device, _DTYPES.get(self.state.mixed_precision))
        self._cast_inputs(model.value)

    def _make_engine(self, plan: Plan) -> None:
        given = plan.given
        if self._cuts_sequences():
            plan.arguments["mpu"] = self._share_sequences(plan.model.value)
        had_state = bool(getattr(given, "state", None))
        if isinstance(given, torch.optim.Optimizer):
            if plan.arguments["optimizer"] is not given:
                call_stepped(given)
            if self.plugin.get_value("zero_optimization.stage") != 0:
                checks.leave_states(given)
        engine, made, _, stepped = deepspeed.initialize(**plan.arguments)
        self._cast_inputs(engine.module)
        if pieces.is_sharded(engine):
            pieces.warn_of_empty_state_dict(engine)
        self.last_engine = plan.model.value = engine
        if plan.optimizer is not None:
            plan.optimizer.value = made
            undo_first_step(engine, had_state=had_state)
            if isinstance(given, torch.optim.Optimizer):
                self.replaced.append((given, engine))
            self._take_over(EngineStepper(engine, plan.fixed_clip))
        if plan.scheduler is not None and stepped is not None:
            plan.scheduler.value = stepped

    def _take_over(self, stepper: EngineStepper) -> None:
        self.steppers.append(stepper)
        if stepper.engine.zero_nvme_offload_optimizer():
            self.can_copy_aside = False  # its states are on a disk since memory has no room for them
        inside = [p for group in stepper.optimizer.param_groups for p in group["params"]]
        for parameter in (*stepper.engine.module.parameters(), *inside):
            self.owners[id(parameter)] = stepper

    def _cast_inputs(self, model: nn.Module) -> None:
        """Let a model whose parameters are small take the batches that it took before."""
        dtype = _DTYPES.get(self.state.mixed_precision)
        if dtype is not None:
            model.register_forward_pre_hook(_casting(dtype), with_kwargs=True, prepend=True)

    def stepper(self, optimizer: Any, scaler: torch.amp.GradScaler | None) -> Stepper | None:
        return next(stepper for stepper in self.steppers if stepper.optimizer is optimizer)

    def engine_scheduler(self, scheduler: Any, optimizers: list[Any]) -> DeepSpeedSchedulerWrapper | None:
        engine = next((s.engine for s in self.steppers if s.engine.lr_scheduler is scheduler), None)
        if engine is None:
            return None
        return DeepSpeedSchedulerWrapper(scheduler, [o for o in optimizers if o.optimizer is engine.optimizer])

    def engine_wrapped(self) -> Any:
        return None if self.last_engine is None else DeepSpeedEngineWrapper(self.last_engine)

    def compile(self, model: nn.Module, *, regional: bool, **kwargs: Any) -> nn.Module:
        if not isinstance(model, self.wrappers):
            return super().compile(model, regional=regional, **kwargs)
        if regional:
            compile_regions_deepspeed(model.module, **kwargs)
        else:
            model.compile(backend=kwargs.pop("backend"), compile_kwargs=kwargs)
        return model

    def free_memory(self) -> None:
        for stepper in self.steppers:
            stepper.engine.destroy()
        self.steppers.clear()
        self.owners.clear()
        self.replaced.clear()
        self.last_engine = None
        self.can_copy_aside = True
        if self.sharing is not None:
            self.sharing.end()
            self.sharing = None

    # --- one step -----------------------------------------------------------------------------------------------

    def micro_batch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any] | None:
        if sync:
            return None
        stepper = next((stepper for stepper in self.steppers if stepper.engine is model), None)
        return None if stepper is None else _kept_back(stepper)

    def backward(self, loss: torch.Tensor, *, divide: bool = True, scale_wrt_gas: bool = True, **kwargs: Any) -> None:
        """scale_wrt_gas: DeepSpeed's word for dividing by the accumulation steps."""
        steps = self.gradient_state.num_steps
        share = loss / steps if divide and scale_wrt_gas and steps > 1 else loss
        reached = self.steppers if len(self.steppers) == 1 else self._reached_by(share)
        if not reached:
            share.backward(**kwargs)
            return
        for stepper in reached:
            stepper.check(alone=len(reached) == 1)
        last = self.gradient_state.sync_gradients
        for other in reached[1:]:
            other.expect(last)  # it sees this backward in its own parameters
        reached[0].backward(share, last=last, **kwargs)

    def _reached_by(self, loss: torch.Tensor) -> list[EngineStepper]:
        """The engines whose parameters a loss depends on."""
        found: list[EngineStepper] = []
        seen: set[Any] = set()
        waiting = [loss.grad_fn]
        while waiting and len(found) < len(self.steppers):
            node: Any = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stepper = self.owners.get(id(getattr(node, "variable", None)))
            if stepper is not None and stepper not in found:
                found.append(stepper)
            waiting += [inner for inner, _ in node.next_functions]
        return found

    def _of(self, parameters: list[torch.Tensor]) -> list[EngineStepper]:
        found = {id(stepper): stepper for p in parameters if (stepper := self.owners.get(id(p))) is not None}
        return list(found.values())

    def averaged_ranks(self) -> int:
        every, config = super().averaged_ranks(), self.state.parallelism_config
        if config is None or self.sharing is None or self.plugin.zero_stage == 3:
            return every
        # Below stage 3, DeepSpeed adds up the gradients of processes that share sequences.
        return every // int(config.sp_size or 1)

    def scale_gradients(self, parameters: list[torch.Tensor], factor: float) -> None:
        for stepper in self._of(parameters):
            stepper.scale(factor)

    def has_gradients(self, parameters: list[torch.Tensor]) -> bool:
        return any(stepper.waiting for stepper in self._of(parameters))

    def gradient_marks(self, parameters: list[torch.Tensor]) -> list[Any]:
        return [stepper.backwards for stepper in self._of(parameters)]

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        raise ValueError("DeepSpeed clips gradients only by their norm: call `clip_grad_norm_`.")

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        steppers = self._of(parameters)
        if not steppers:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ValueError(f"DeepSpeed clips gradients only by their 2-norm, not {norm_type}: leave `norm_type` out.")
        norms = [stepper.clip(max_norm) for stepper in steppers]
        return norms[0] if len(norms) == 1 else torch.stack(norms).norm()

    # --- weights ------------------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        engine: Any = model
        if not pieces.is_sharded(model):
            whole: dict[str, Any] = clone_tensors_for_torch_save(super().state_dict(model, unwrap=unwrap))
            return whole
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ValueError(
                "The weights of this model are sharded, and its DeepSpeed config has "
                "stage3_gather_16bit_weights_on_model_save=False: set it (`zero3_save_16bit_model` of the plugin), "
                "or call `save_model`, which gathers a few of them at a time."
            )
        gathered: dict[str, Any] | None = engine._consolidated_16bit_state_dict()
        return gathered or {}  # on other processes than the first

    def stream_weights(self, model: nn.Module) -> tuple[dict[str, Any], Fetch] | None:
        return pieces.stream(model) if pieces.is_sharded(model) else None

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self, run: Run, weights: list[dict[str, Any]], *, safe: bool, main: bool, **kwargs: Any) -> Iterator[Part]:
        if run.gradients is not None and run.progress is not None:
            _say_what_is_lost()
            run.progress.update(gradients=False, counts=[], windows=[], sync_gradients=True)
        for number, model in enumerate(run.models):
            if self._is_trained(model):
                yield from deepspeed_checkpoint.parts(model, number, **kwargs)
                continue
            own = pieces.gathered(model, keep=main) if pieces.is_sharded(model) else self.state_dict(model)
            if main:
                yield File(layout.model(number, True), clean_state_dict_for_safetensors(own), True)

    def _is_trained(self, model: nn.Module) -> bool:
        """Whether a model has an engine with an optimizer: DeepSpeed saves no others."""
        return any(stepper.engine is model for stepper in self.steppers)

    def load(self, run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        numbers = {id(model): number for number, model in enumerate(run.models)}
        puts = [self._read(model, numbers[id(model)], reader, torch_load, kwargs) for model in run.models_to_load]

        def rest() -> None:
            for stepper in self.steppers:
                stepper.zero_grad()
            for put in puts:
                put()
            for optimizer, engine in self.replaced:
                optimizer.param_groups = engine.basic_optimizer.param_groups

        return StagedLoad(rest)

    def _read(
        self,
        model: nn.Module,
        number: int,
        reader: CheckpointReader,
        torch_load: dict[str, Any],
        kwargs: dict[str, Any],
    ) -> Callable[[], Any]:
        if self._is_trained(model):
            return deepspeed_checkpoint.read(model, reader, number, torch_load, **kwargs)
        inner = self.unwrap(model, keep_torch_compile=False)
        weights = reader.weights(layout.model(number, True), {})
        if not pieces.is_sharded(model):
            return functools.partial(inner.load_state_dict, weights, **kwargs)
        return functools.partial(pieces.share_out, weights, inner)


@cache
def _say_what_is_lost() -> None:
    logger.warning(
        "save_state was called while gradients were being accumulated, which DeepSpeed's checkpoints do not hold: "
        "after a load that window starts over; save when `accelerator.sync_gradients`, after `optimizer.step()`."
    )


@contextmanager
def _kept_back(stepper: EngineStepper) -> Iterator[None]:
    stepper.kept_back += 1
    try:
        yield
    finally:
        stepper.kept_back -= 1


def _casting(dtype: torch.dtype) -> Callable[..., Any]:
    from accelerate.comm.tree import recursively_apply

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if len(args) == 1 and not kwargs:
            if type(args[0]) is torch.Tensor and args[0].dtype is dtype:
                return None
            return (recursively_apply(cast, args[0]),), kwargs
        return recursively_apply(cast, args), recursively_apply(cast, kwargs)

    return hook
