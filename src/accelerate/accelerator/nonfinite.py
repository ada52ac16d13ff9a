"""`nonfinite="stop"`: the first step whose gradients are not finite ends the run, and says where that came from.

The step itself is left out by its `Stepper`, so the weights are still those that the bad values were computed with. On
the way there is only a note of each loss, and of what the models were called with. When a step was left out, all ranks
know: each looks at its losses, runs the forwards of the step again with a hook on every module, and they tell each
other; under fp16 only if a loss or a parameter is not finite, since else it was the scaling factor. On a GPU whose
optimizer decides there, the flag is read one step later, when it has long arrived.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accelerate.comm import current
from accelerate.comm.tree import leaves
from accelerate.precision.stepping import SkippingStepper, Stepper
from accelerate.random import capture_random_states, restore_random_states
from accelerate.torch_internals.modules import name_without_wrappers

if TYPE_CHECKING:
    from accelerate.accelerator.base import AcceleratorBase

# Of forwards that come without a step there would be no end.
_MOST = 64
_SAMPLES_SHOWN = 16


class _Loss(NamedTuple):
    value: torch.Tensor
    # The epoch, the number of the batch in it, the indices of its samples; None outside of prepared loaders.
    batch: tuple[int, int, list[Any] | None] | None


class _Forward(NamedTuple):
    model: weakref.ref[torch.nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class _Window:
    """What led to one step."""

    losses: deque[_Loss] = field(default_factory=lambda: deque(maxlen=_MOST))
    forwards: deque[_Forward] = field(default_factory=lambda: deque(maxlen=_MOST))


class _Asked(NamedTuple):
    """A step of which it is not known yet whether it was left out."""

    number: int
    window: _Window
    flags: list[torch.Tensor]
    wait: Callable[[], Any]


class StopAtNonfinite:
    """Of one Accelerator."""

    def __init__(self, accelerator: AcceleratorBase) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._state = accelerator.gradient_state
        self._window = self._last = _Window()
        self._asked: _Asked | None = None
        self._steps = 0

    def note_forwards(self, model: torch.nn.Module) -> None:
        """Have each forward of a prepared model noted, if it may be followed by a backward."""
        model.register_forward_pre_hook(_Note(self, model), with_kwargs=True)

    def note_forward(self, forward: _Forward) -> None:
        self._window.forwards.append(forward)

    def forget(self) -> None:
        """Let go of what was noted: losses, and what models were called with."""
        self._window = self._last = _Window()
        self._asked = None

    def note_loss(self, loss: torch.Tensor) -> None:
        loader = self._state.active_dataloader
        self._window.losses.append(_Loss(loss.detach(), None if loader is None else loader.samples_at_hand()))

    def after_step(self, stepper: Stepper) -> None:
        """An optimizer has stepped, or not. All ranks come here alike."""
        self._steps += 1
        self.look_at_last()
        if self._window.losses:  # else another optimizer has stepped for the same losses
            self._last, self._window = self._window, _Window()
        if isinstance(stepper, SkippingStepper) and (flags := stepper.flags()):
            from accelerate.tracking.outbox import end_of_copies, own_copy

            self._asked = _Asked(self._steps, self._last, own_copy(flags), end_of_copies(flags))
        elif stepper.skipped:
            self._stop(self._steps, self._last)

    def look_at_last(self) -> None:
        """Raises if the step that was asked about last was left out."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        asked.wait()
        if any(bool(flag) for flag in asked.flags):
            self._stop(asked.number, asked.window)

    def _stop(self, number: int, window: _Window) -> None:
        """Say on all ranks where it came from. Under fp16 it may be the factor alone: then nothing happens."""
        accelerator = self._accelerator()
        if accelerator is None:
            return
        scaled = accelerator.scaler is not None and accelerator.scaler.is_enabled()
        if scaled and all(current().gather_objects(_begins_well(accelerator, window))):
            return
        reports = current().gather_objects((_report(accelerator, window), _gradient(accelerator)))
        told = [f"on rank {rank} {report}" for rank, (report, _) in enumerate(reports) if report]
        gradient = next((name for _, name in reports if name), "a gradient")
        where = "; ".join(told) or f"every loss and every output is finite, but {gradient} is not"
        look = "Look at these samples, lower" if "samples" in where else "Lower"
        raise FloatingPointError(
            f"Step {number} was not taken, because its gradients are not finite: {where}. {look} the learning rate, or "
            "clip gradients; Accelerator(nonfinite='skip') skips such steps."
        )


class _Note:
    """The hook of a model. It is of this process and of this model: a copy of it does nothing."""

    def __init__(self, to: StopAtNonfinite | None = None, model: torch.nn.Module | None = None) -> None:
        self._to = None if to is None else weakref.ref(to)
        self._model = None if model is None else weakref.ref(model)

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        to = None if self._to is None else self._to()
        if to is not None and self._model is not None and torch.is_grad_enabled():
            to.note_forward(_Forward(self._model, args, kwargs))

    def __reduce__(self) -> tuple[type[_Note], tuple[()]]:
        return _Note, ()


def _begins_well(accelerator: AcceleratorBase, window: _Window) -> bool:
    """Whether this rank's losses are finite, and the parameters that they came from."""
    parameters = (parameter for _, parameter in _parameters(accelerator))
    return all(_is_finite(loss.value) for loss in window.losses) and all(map(_is_finite, parameters))


def _report(accelerator: AcceleratorBase, window: _Window) -> str:
    """What this rank finds wrong; called on all of them, since some forwards need all."""
    module = _first_module(accelerator, window)
    for name, parameter in _parameters(accelerator):
        if not _is_finite(parameter):
            return f"the parameter `{name}` was already not finite before the step"
    bad = [loss for loss in window.losses if not _is_finite(loss.value)]
    values = ", ".join(f"{loss.value.float().mean().item():g}{_of_batch(loss)}" for loss in bad)
    if bad and module is None:
        return f"the loss is {values}, and every module's output is finite"
    if bad:
        return f"the loss is {values}, and {module}"
    return "" if module is None else f"the loss is finite, but {module}"


def _of_batch(loss: _Loss) -> str:
    if loss.batch is None:
        return ""
    epoch, number, samples = loss.batch
    if samples is None:
        return f" (epoch {epoch}, batch {number})"
    more = f" and {len(samples) - _SAMPLES_SHOWN} more" * (len(samples) > _SAMPLES_SHOWN)
    shown = ", ".join(map(str, samples[:_SAMPLES_SHOWN]))
    return f" (epoch {epoch}, batch {number}, samples {shown}{more})"


def _first_module(accelerator: AcceleratorBase, window: _Window) -> str | None:
    """The first module whose output is not finite, in forwards like those of the step."""
    found: list[str] = []
    for forward in window.forwards:
        if (model := forward.model()) is None:
            continue
        called = _innermost(accelerator, model)
        with (
            _as_before(accelerator, called),
            _watched(called, found),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            called(*forward.args, **forward.kwargs)
    return found[0] if found else None


@contextmanager
def _as_before(accelerator: AcceleratorBase, model: torch.nn.Module) -> Iterator[None]:
    """Afterwards buffers, such as those of BatchNorm, and random states are what they were."""
    device = accelerator.state.device_kind
    states = capture_random_states(device)
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        restore_random_states(states, device)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer.copy_(value))


@contextmanager
def _watched(model: torch.nn.Module, found: list[str]) -> Iterator[None]:
    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not found and not all(map(_is_finite, leaves(output))):
                called = f"`{name}` ({type(module).__name__})" if name else f"the {type(module).__name__} itself"
                found.append(f"{called} is the first module whose output is not finite")

        return hook

    hooks = [
        module.register_forward_hook(hook_of(name_without_wrappers(name))) for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _innermost(accelerator: AcceleratorBase, model: torch.nn.Module) -> Any:
    """What to call: as it was prepared where a forward needs all ranks, else without wrappers, which may exchange
    something."""
    strategy = accelerator._strategy
    return model if strategy.needs_even_batches else strategy.unwrap(model, keep_torch_compile=False)


def _gradient(accelerator: AcceleratorBase) -> str:
    """The first one that is not finite; nothing if none is there, or they are cleared already."""
    for name, parameter in _parameters(accelerator):
        if not all(map(_is_finite, accelerator._strategy.gradients([parameter]))):
            return f"the gradient of `{name}`"
    return ""


def _parameters(accelerator: AcceleratorBase) -> Iterator[tuple[str, torch.Tensor]]:
    for model in accelerator._models:
        for name, parameter in _innermost(accelerator, model).named_parameters():
            yield name_without_wrappers(name), parameter


def _is_finite(tensor: torch.Tensor) -> bool:
    tensor = tensor.detach()
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not (local.is_floating_point() or local.is_complex()):
        return True
    return bool(local.isfinite().all())
