"""What the first backward of a script shows: something was not prepared, or was prepared and is not used.

Until then it stands in the place of the strategy's `backward`, and afterwards nothing of it is left on the step path.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate.errors import warn
from accelerate.torch_internals.data_loader import is_being_read
from accelerate.torch_internals.process_groups import default_store

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator
    from accelerate.strategies import Strategy

# So many processes tell each other their losses, and look for the others' in so many backwards.
_COMPARED, _LOOKS = 8, 10
_numbers = itertools.count()


class _Check:
    """Something that shows only later: asked at the backwards that follow whether it is over, for some time."""

    def __init__(self, accelerator: Accelerator, looks: int = _LOOKS) -> None:
        self.accelerator = weakref.ref(accelerator)
        self._looks = looks

    def is_over(self) -> bool:
        """Whether there is nothing left to look for."""
        self._looks -= 1
        return self._looks <= 0 or self.accelerator() is None

    def note(self) -> None:
        """Look at what the backward has left."""

    def end(self) -> None:
        """Leave nothing behind."""


class FirstBackward:
    """Stands in for `strategy.backward`, and takes itself away when it has seen all that it looks for."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = weakref.ref(strategy)
        self._checks: list[_Check] | None = None

    def __call__(self, loss: torch.Tensor, **kwargs: Any) -> None:
        strategy = self._strategy()
        assert strategy is not None
        accelerator = strategy.accelerator()
        if not hasattr(loss, "backward"):
            pass  # it is about to be refused
        elif self._checks is None:
            self._checks = [] if accelerator is None else _look(accelerator, strategy, loss)
        else:
            for check in [check for check in self._checks if check.is_over()]:
                check.end()
                self._checks.remove(check)
        if not self._checks:
            del strategy.backward
        type(strategy).backward(strategy, loss, **kwargs)
        for check in self._checks or ():
            check.note()


def _look(accelerator: Accelerator, strategy: Strategy, loss: torch.Tensor) -> list[_Check]:
    """Say what can be said now; returns what shows later."""
    checks: list[_Check] = []
    if accelerator.gradient_accumulation_steps > 1 and not strategy.owns_accumulation:
        steps = _StepsInBetween(accelerator)
        checks += [steps, _ClearedInBetween(accelerator, steps), _SameMicroBatch(accelerator)]
    if accelerator.num_processes == 1:
        return checks
    wrapped = [model for model in accelerator._models if isinstance(model, DistributedDataParallel)]
    if called := [model for model in wrapped if not strategy.bypassed([model])]:
        checks.append(_BackwardAgain(accelerator, called))
    if accelerator._models and not accelerator._optimizers:
        _look_for_optimizer(accelerator, strategy)
    if not accelerator._models:
        _look_for_model(accelerator)
    elif _none_was_called(accelerator, strategy):
        _say(
            accelerator,
            "The model that `accelerator.prepare()` returned was not called before this backward, so gradients are "
            f"not averaged over the {accelerator.num_processes} processes, and each trains its own model: use what "
            "it returns, as in `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`.",
        )
        _have_said_so(accelerator)
    elif accelerator.gradient_state.active_dataloader is None:
        checks += _Losses.of(accelerator, strategy, loss)
    return checks


def _say(accelerator: Accelerator, sentence: str) -> None:
    if accelerator.is_main_process:
        warn(sentence)


def _have_said_so(accelerator: Accelerator) -> None:
    """Prepared optimizers need not find out the same at their first steps."""
    for optimizer in accelerator._optimizers:
        optimizer._prepared_parameters = None


def _look_for_model(accelerator: Accelerator) -> None:
    _have_said_so(accelerator)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers: tuple[type, ...] = (DistributedDataParallel,)
    if fsdp is not None:
        wrappers += (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    # By type: to ask some objects what they are would wake them up.
    if not any(issubclass(type(item), wrappers) for item in gc.get_objects()):
        _say(
            accelerator,
            "No model was passed to `accelerator.prepare()` before this backward, so gradients are not averaged over "
            f"the {accelerator.num_processes} processes: pass model, optimizer and loader to it, and use what it "
            "returns; if each process is meant to train its own model, call `loss.backward()` instead.",
        )


def _look_for_optimizer(accelerator: Accelerator, strategy: Strategy) -> None:
    for item in gc.get_objects():
        if issubclass(type(item), torch.optim.Optimizer) and any(
            strategy.has_replaced(parameter)
            for group in getattr(item, "param_groups", ())
            for parameter in group["params"]
        ):
            _say(
                accelerator,
                f"This script has an optimizer ({type(item).__name__}) with the parameters that the model had before "
                "it was sharded, so its steps change nothing: pass it to `accelerator.prepare()`, and use what it "
                "returns.",
            )
            return


def _none_was_called(accelerator: Accelerator, strategy: Strategy) -> bool:
    """Whether every model that the engine has wrapped was left alone so far, as if nobody had it."""
    models = [model for model in accelerator._models if any(p.requires_grad for p in model.parameters())]
    idle = strategy.bypassed(models)
    return bool(idle) and all(id(p) in idle for model in models for p in model.parameters())


class _StepsInBetween(_Check):
    """Looks at the first optimizer that steps by itself: a prepared one would wait for the end of a window."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator, _LOOKS + 2 * accelerator.gradient_accumulation_steps)
        self.seen = False
        self._prepared = bool(accelerator._models)
        state = accelerator.gradient_state
        # Whether nothing shows a window: neither `accumulate`, here or before a resume, nor gradients from before.
        self._alone = accelerator.step == 0 and not state.end_of_dataloader and not _any(accelerator)
        self._first = state.backwards + 1  # how many there will have been after this one
        self._hook = register_optimizer_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        accelerator = self.accelerator()
        if self.seen or accelerator is None:
            return
        trained = {id(parameter) for model in accelerator._models for parameter in model.parameters()}
        mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._prepared and trained.isdisjoint(map(id, mine)):
            return  # something else that the script trains; all of it, once `free_memory` was called
        self.seen = True
        state = accelerator.gradient_state
        if state.sync_gradients:
            if self._alone and state.backwards == self._first:
                self._say_window_of_one(accelerator, optimizer)
            return  # it does wait
        known = any(optimizer is prepared.optimizer for prepared in accelerator._optimizers)
        remedy = "step the one that it returned" if known else "pass it to `accelerator.prepare()`, with the model"
        _say(
            accelerator,
            f"This {type(optimizer).__name__} steps in the middle of an accumulation window of "
            f"{accelerator.gradient_accumulation_steps} micro-batches: it is not the optimizer that "
            f"`accelerator.prepare()` returns, which steps only after the last of them; {remedy}.",
        )

    @staticmethod
    def _say_window_of_one(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
        steps = accelerator.gradient_accumulation_steps
        _say(
            accelerator,
            f"gradient_accumulation_steps is {steps}, but this {type(optimizer).__name__} steps after a single "
            f"micro-batch, whose loss was divided by {steps}: put each micro-batch into `with "
            "accelerator.accumulate(model):`, or leave the setting out.",
        )

    def is_over(self) -> bool:
        return super().is_over() or self.seen

    def end(self) -> None:
        self._hook.remove()  # not while torch goes through its hooks


class _ClearedInBetween(_Check):
    """Notices that gradients have gone in the middle of the first window, and no step has used them."""

    def __init__(self, accelerator: Accelerator, steps: _StepsInBetween) -> None:
        super().__init__(accelerator, accelerator.gradient_accumulation_steps)
        self._steps = steps
        self._waiting = False  # gradients that the backward before has left for the next one

    def note(self) -> None:
        accelerator = self.accelerator()
        self._waiting = accelerator is not None and not accelerator.gradient_state.sync_gradients and _any(accelerator)

    def is_over(self) -> bool:
        accelerator = self.accelerator()
        if accelerator is None or not accelerator._models or self._steps.seen:
            return True
        if self._waiting and not _any(accelerator):
            _say(
                accelerator,
                "The gradients of an accumulation window were cleared before its last micro-batch, so those before it "
                "do not count: call `zero_grad()` of the optimizer that `accelerator.prepare()` returned, after its "
                "`step()`; before a backward, or of the model, it clears what waits for the step.",
            )
            return True
        return super().is_over()


class _SameMicroBatch(_Check):
    """Notices an `accumulate` around a whole loop: a batch later, its micro-batch is still the same."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._before: tuple[int, int | None] = (0, None)

    def is_over(self) -> bool:
        accelerator = self.accelerator()
        if accelerator is None:
            return True
        step, batch = _micro_batch(accelerator)
        if 0 < step == self._before[0] and None not in (batch, self._before[1]) and batch != self._before[1]:
            _say(
                accelerator,
                "Two batches were read inside of one `with accelerator.accumulate(...):`, which counts as one "
                "micro-batch, so windows do not end where they should: put it inside the loop over batches.",
            )
            return True
        return super().is_over()

    def note(self) -> None:
        if (accelerator := self.accelerator()) is not None:
            self._before = _micro_batch(accelerator)


class _Forwards:
    """Counts the forwards of a model, as a hook; one in a copy of the model counts by itself.

    synced: whether the last one made DDP average the gradients of its backward, as under `no_sync` it does not.
    """

    count, synced = 0, False

    def __call__(self, model: DistributedDataParallel, args: Any) -> None:
        self.count += 1
        self.synced = model.require_backward_grad_sync


class _BackwardAgain(_Check):
    """Notices two backwards of a model with no forward in between: DDP averages the gradients of the first alone."""

    def __init__(self, accelerator: Accelerator, models: list[DistributedDataParallel]) -> None:
        super().__init__(accelerator)
        self._models = models
        self._forwards = [_Forwards() for _ in models]
        self._hooks = [
            model.register_forward_pre_hook(each) for model, each in zip(models, self._forwards, strict=True)
        ]
        self._averaged: list[int | None] = [None] * len(models)  # in a backward after so many forwards
        self._marks = self._marks_now()

    def _marks_now(self) -> list[list[Any]]:
        accelerator = self.accelerator()
        find = None if accelerator is None else accelerator._strategy.gradient_marks
        return [[] if find is None else find(list(model.parameters())) for model in self._models]

    def is_over(self) -> bool:
        self._marks = self._marks_now()
        return super().is_over() or not self._hooks

    def note(self) -> None:
        accelerator = self.accelerator()
        if accelerator is None:
            return
        for number, (before, now) in enumerate(zip(self._marks, self._marks_now(), strict=True)):
            forwards = self._forwards[number].count
            if before == now or not self._hooks or not self._forwards[number].synced:
                continue  # what is not averaged now is later
            if self._averaged[number] == forwards:
                _say(
                    accelerator,
                    "This is the second backward without a forward of the model in between, so DDP does not average "
                    f"its gradients over the {accelerator.num_processes} processes, whose weights go different ways: "
                    "add the losses up for one `accelerator.backward()`, or call each backward before the next "
                    "forward.",
                )
                self.end()
            self._averaged[number] = forwards

    def end(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _micro_batch(accelerator: Accelerator) -> tuple[int, int | None]:
    """How many there were, and which batch of a prepared loader is at hand."""
    read = getattr(accelerator.gradient_state.active_dataloader, "samples_at_hand", lambda: None)()
    return accelerator.step, None if read is None else read[1]


def _any(accelerator: Accelerator) -> bool:
    """Whether gradients wait where torch keeps them: those that an engine keeps elsewhere are cleared by nobody."""
    return any(p.grad is not None for model in accelerator._models for p in model.parameters())


class _Losses(_Check):
    """Compares the first losses of some processes, through the store: nobody waits for anybody.

    They tell it before their first backward, in which models are exchanged; so they have when rank 0 asks later.
    """

    def __init__(self, accelerator: Accelerator, mine: float, ranks: list[int]) -> None:
        super().__init__(accelerator)
        self._store: Any = default_store("accelerate/first-loss")
        self._mine, number = mine.hex(), next(_numbers)
        self._keys = [f"{number}/{rank}" for rank in ranks]
        if accelerator.process_index in ranks and self._store is not None:
            self._store.set(f"{number}/{accelerator.process_index}", self._mine)

    @classmethod
    def of(cls, accelerator: Accelerator, strategy: Strategy, loss: torch.Tensor) -> list[_Check]:
        """Where a loader is read that was not prepared: the batch at hand may be the same everywhere."""
        shares = strategy.data_shares()
        ranks = sorted({share: rank for rank, share in reversed(list(enumerate(shares)))}.values())[:_COMPARED]
        if len(ranks) < 2 or type(loss) is not torch.Tensor or loss.numel() != 1 or not is_being_read():
            return []
        if loss.dtype not in (torch.float32, torch.float64):  # halves are often equal by chance
            return []
        value = float(loss.item())
        return [cls(accelerator, value, ranks)] if math.isfinite(value) else []

    def is_over(self) -> bool:
        accelerator = self.accelerator()
        if super().is_over() or accelerator is None or self._store is None or not accelerator.is_main_process:
            return True
        if not self._store.check(self._keys):
            return False
        if all(self._store.get(key).decode() == self._mine for key in self._keys):
            _say(
                accelerator,
                f"All {accelerator.num_processes} processes had the same loss in their first step, with batches of a "
                "DataLoader that was not passed to `accelerator.prepare()`: they train on the same data; pass it to "
                "`prepare`, and use the loader that it returns.",
            )
        return True
