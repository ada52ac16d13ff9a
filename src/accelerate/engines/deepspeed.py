"""The engine of DeepSpeed, and the optimizer and the scheduler inside it, as a script sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from accelerate.engines.wrappers import OptimizerOfEngine, SchedulerOfEngine
from accelerate.errors import NotYetSupported, warn
from accelerate.precision.stepping import Stepper
from accelerate.torch_internals.tensors import multiply_


class DeepSpeedEngineWrapper:
    """Run backward and step of a DeepSpeed engine together, for scripts that use the engine without the Accelerator.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward of a loss, and a step at the end of an accumulation window.

        Args:
            loss: the loss.
            sync_gradients: whether this is the last backward of the window.
            **kwargs: arguments of the engine's `backward`.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float:
        """Return the norm of the gradients of the last step, over all ranks."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


class DeepSpeedOptimizerWrapper(OptimizerOfEngine):
    """Wrap the optimizer of a DeepSpeed engine.

    Args:
        optimizer: the optimizer.
        device_placement: not used, since the engine places its state.
        scaler: not used, since the engine scales losses.
        stepper: how the engine steps it. By default it has been stepped already.
    """

    skipped_attribute = "overflow"


class DeepSpeedSchedulerWrapper(SchedulerOfEngine):
    """Wrap the scheduler of a DeepSpeed engine, which steps it together with the optimizer.

    Args:
        scheduler: the scheduler.
        optimizers: the optimizer or optimizers.
    """


class EngineStepper(Stepper):
    """The gradients of one engine between its backwards, and its steps.

    fixed_clip: the norm that the config of the engine says to clip at, None where it leaves that to the script.
    """

    def __init__(self, engine: Any, fixed_clip: float | None) -> None:
        super().__init__(engine.optimizer)
        self.engine = engine
        self.fixed_clip = fixed_clip
        self.usual_clip: float = engine.gradient_clipping()
        # Without ZeRO each process has whole gradients, where torch has them.
        self.whole = not engine.zero_optimization()
        # How many contexts are open that keep gradients to this process.
        self.kept_back = 0
        # How many backwards this engine has seen.
        self.backwards = 0
        # In fp16 without ZeRO: what the optimizer divides gradients by; some releases do not multiply losses with it.
        scaling = getattr(engine.optimizer, "loss_scale_config", None)
        self.scaling = scaling if self.whole and getattr(scaling, "use_grad_scaling", False) else None
        # Whether losses are multiplied with a scale of this engine alone before their backward.
        scalers = (
            getattr(engine.optimizer, "torch_autocast_gradscaler", None),
            getattr(engine, "torch_autocast_z0_gradscaler", None),
        )
        self.scales_losses = engine.fp16_enabled() or any(scaler is not None for scaler in scalers)
        self._warned = self._said_nothing_was_done = False
        # Whether the next step clips at another norm than the usual one.
        self._clips_otherwise = False
        engine.set_gradient_accumulation_boundary(is_boundary=True)
        self._begin()

    def _begin(self) -> None:
        # Whether gradients wait, whether they are those of a whole window, and what they are to be multiplied with.
        self.waiting = self.complete = False
        self.factor = 1.0

    def check(self, *, alone: bool) -> None:
        """Refuse a backward that cannot come out right, before any engine knows of it.

        alone: whether the loss depends on no other engine.
        """
        if self.complete and not self.whole and self.engine.zero_optimization_stage() < 3:
            raise RuntimeError(
                "DeepSpeed would lose the gradients of the backward before this one, since no step came between: "
                "add the losses and call `backward` once, or call all but the last inside "
                "`accelerator.no_sync(model)`."
            )
        if self.scales_losses and not alone:
            raise NotYetSupported(
                "A loss of several DeepSpeed engines in fp16",
                "use 'bf16', or call `backward` with a loss of each engine by itself.",
            )

    def backward(self, loss: torch.Tensor, *, last: bool, **kwargs: Any) -> None:
        """The backward of a loss that is divided already. last: whether it completes the gradients of a step."""
        self.expect(last)
        if self.scaling is None:
            self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
            return
        # The backward begins with the scale, whether or not whoever calls it has multiplied with that.
        scale = self.scaling.cur_scale
        with loss.register_hook(lambda gradient: torch.full_like(gradient, scale)):
            self.engine.backward(loss, scale_wrt_gas=False, **kwargs)

    def expect(self, last: bool) -> None:
        """Be told of a backward that is about to come through this engine, and was checked."""
        last = last and not self.kept_back
        if self.engine.is_gradient_accumulation_boundary() is not last:  # to say it takes longer than to ask
            self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        self.backwards += 1
        self.waiting, self.complete = True, last

    def step(self, closure: Callable[[], Any] | None = None, *, last: bool = True) -> Any:
        if closure is not None:
            raise ValueError("DeepSpeed's optimizers take no closure: compute the loss before `step()`.")
        if not self.waiting:
            if not self.backwards:
                self._say_that_nothing_was_done()
            return None
        if not self.complete:
            raise RuntimeError(
                "The gradients of this DeepSpeed engine are not complete, because its last backward ran inside "
                "`no_sync`: call the last backward before `optimizer.step()` outside it."
            )
        scaled = self.factor != 1.0
        if scaled:
            self.optimizer.override_loss_scale(self.optimizer.loss_scale / self.factor)
        try:
            self.engine.step()
        finally:
            if scaled:
                self.optimizer.custom_loss_scaler = False
            if self._clips_otherwise:
                self._clip_at(self.usual_clip)
                self._clips_otherwise = False
            self._begin()
        return None

    def _say_that_nothing_was_done(self) -> None:
        if not self._said_nothing_was_done:
            self._said_nothing_was_done = True
            warn(
                "`optimizer.step()` did nothing, because DeepSpeed steps only with gradients of "
                "`accelerator.backward(loss)`: call that instead of `loss.backward()`."
            )

    def zero_grad(self, set_to_none: bool | None = None, *, last: bool = True) -> None:
        # After a step there is nothing to clear; what was not stepped with is dropped, wherever the engine keeps it.
        if not self.waiting:
            return
        self.engine.zero_grad()
        if not self.whole:
            self.optimizer.zero_grad(set_to_none=True)
            if self.engine.zero_optimization_stage() < 3:
                self._forget_partitions()
        self._begin()

    def _forget_partitions(self) -> None:
        optimizer: Any = self.optimizer
        optimizer.micro_step_id = -1
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in kept:
                kept[group] = None
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()

    @property
    def skipped(self) -> bool:
        return bool(getattr(self.optimizer, "overflow", False))

    def for_other(self, optimizer: Any) -> Stepper:
        raise ValueError(
            "The optimizer of a DeepSpeed engine cannot be replaced: prepare the model again with another."
        )

    # --- gradients ----------------------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        """Multiply the gradients that wait for the next step."""
        if self.whole:
            multiply_([p.grad for p in self.engine.module.parameters() if p.grad is not None], factor)
        elif hasattr(self.optimizer, "override_loss_scale"):
            self.factor *= factor  # where the optimizer divides by the scale of losses anyway
        else:
            name = type(self.optimizer).__name__
            raise NotYetSupported(f"`num_items` with DeepSpeed's {name}", "leave out `grad_accum_dtype` in its config.")

    def clip(self, max_norm: float) -> torch.Tensor:
        """Have the next step clip at a norm; returns what the norm is."""
        norm = self.norm()
        if self.fixed_clip is None:
            self._clip_at(max_norm)
            self._clips_otherwise = True
        elif self.fixed_clip != max_norm and math.isfinite(max_norm) and not self._warned:
            self._warned = True
            warn(
                f"clip_grad_norm_ was called with max_norm={max_norm}, but the DeepSpeed config clips at "
                f"{self.fixed_clip}, which takes precedence: write 'auto' there, or make them the same."
            )
        return norm

    def _clip_at(self, norm: float) -> None:
        norm = norm if math.isfinite(norm) else 0.0
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = norm
        else:
            self.engine._config.gradient_clipping = norm

    def norm(self) -> torch.Tensor:
        """The norm of all gradients of the engine, over all processes."""
        return self._scaled_norm() * self.factor

    def _scaled_norm(self) -> torch.Tensor:
        optimizer: Any = self.optimizer
        if self.whole:
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            scale = getattr(getattr(optimizer, "loss_scale_config", None), "cur_scale", 1.0)
            return torch.nn.utils.get_total_norm(gradients) / scale
        if hasattr(optimizer, "scaled_global_norm"):
            return _unscaled(optimizer.scaled_global_norm(), optimizer.loss_scale)
        if hasattr(optimizer, "_get_norm_groups"):
            norms = [torch.as_tensor(norm).float() for norm in optimizer._get_norm_groups()]
            if any(norm < 0 for norm in norms):
                return torch.tensor(math.inf)
            return _unscaled(torch.stack(norms).norm(), optimizer.loss_scale)
        from deepspeed.utils import safe_get_full_grad

        found = map(safe_get_full_grad, self.engine.module.parameters())
        return torch.nn.utils.get_total_norm([gradient for gradient in found if gradient is not None])


def undo_first_step(engine: Any, *, had_state: bool) -> None:
    """In 16 bits without ZeRO, DeepSpeed makes the states of an optimizer by a step with gradients of zero.

    That step decays weights, and counts. had_state: whether the optimizer has had states before.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_groups") or engine.zero_optimization():
        return
    for small, large in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for source, target in zip(small, large, strict=True):
            target.data.copy_(source.data)
    if not had_state:
        optimizer.optimizer.state.clear()


def _unscaled(norm: Any, scale: float) -> torch.Tensor:
    """DeepSpeed says -1 for a norm that is not finite."""
    norm = torch.as_tensor(norm)
    return torch.where(norm < 0, math.inf, norm / scale)


def need_operation(builder: str, purpose: str, instead: str = "") -> None:
    """Load an operation of DeepSpeed, which it compiles where that was not done, or say what is missing."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    found = get_accelerator().create_op_builder(builder)
    try:
        found.load(verbose=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        if installed_ops.get(found.name):
            raise ImportError(
                f"{purpose} needs an operation of DeepSpeed that was compiled for another torch than "
                f"{torch.__version__} ({reason}): install deepspeed again, in this environment{instead}."
            ) from error
        raise ImportError(
            f"{purpose} needs an operation of DeepSpeed that cannot be compiled here ({reason}): install g++ and ninja "
            f"(`pip install ninja`){instead}."
        ) from error


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """Create DeepSpeed's CPU optimizer that corresponds to Adam, AdamW or Adagrad of torch.

    Args:
        optimizer: the torch optimizer.

    Returns:
        The DeepSpeed optimizer, with the same param groups and settings.

    Raises:
        ValueError: DeepSpeed has no such optimizer on the CPU.
        ImportError: DeepSpeed's operation cannot be compiled here.
    """
    name = type(optimizer).__name__.lower()
    if "adam" not in name and "adagrad" not in name:
        raise ValueError(f"DeepSpeed has no {type(optimizer).__name__} on the host: use Adam, AdamW or Adagrad.")
    need_operation(
        "CPUAdagradBuilder" if "adagrad" in name else "CPUAdamBuilder",
        "An optimizer on the host",
        ", or write zero_force_ds_cpu_optimizer=false into the config to step with torch's own",
    )
    settings = {key: optimizer.defaults[key] for key in ("lr", "weight_decay", "eps")}
    if "adagrad" in name:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(optimizer.param_groups, **settings)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    settings |= {key: optimizer.defaults[key] for key in ("betas", "amsgrad")}
    decoupled = optimizer.defaults.get("decoupled_weight_decay", "adamw" in name)
    return DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=decoupled, **settings)
