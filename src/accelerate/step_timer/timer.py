"""Taking the times of training steps. Nothing of it is on the step path unless it is used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate.comm import current
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accelerate.step_timer.clocks import HostClock, clock_for
from accelerate.step_timer.hints import facts_of, hints
from accelerate.step_timer.table import PHASES, print_table, summary
from accelerate.torch_internals.compile import original_of
from accelerate.torch_internals.ddp import measure_every, measured

# What makes a batch one that is trained on, and so its time a step. (An evaluation does neither.)
_TRAINING = ("backward", "optimizer")
_COLLECTIVES = ("barrier", "gather", "all_reduce", "broadcast", "scatter", "gather_objects", "broadcast_objects")


class StepTimer:
    """A context around a training loop (see `Accelerator.step_timer`).

    After the block: steps: how many were measured. seconds: for each rank, by phase, the mean of a step.
    slowest: the rank whose own work, without waiting for others, takes longest.
    """

    def __init__(self, accelerator: Any, warmup: int = 1) -> None:
        if warmup < 0:
            raise ValueError(f"warmup is {warmup}: give the number of steps to leave out, 0 or more.")
        self.steps: int = 0
        self.seconds: list[dict[str, float]] = []
        self.slowest: int = 0
        self._accelerator = accelerator
        self._warmup = warmup
        self._clock = HostClock()
        self._batches = self._trained = 0  # how many came, and how many of them were trained on
        self._loops: list[_Loop] = []  # that go on, each inside the one before it
        self._phases: list[str] = []
        self._reductions: list[_Reductions] = []
        self._undo = ExitStack()
        self._active = False

    def __enter__(self) -> StepTimer:
        accelerator = self._accelerator
        self._clock = clock_for(accelerator.device)
        self._batches = self._trained = 0  # a timer may be used again, and then starts from zero
        self._loops = []
        self._reductions = []
        for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader):
            self._replace(kind, "__iter__", self._timed_iteration)
        for model in accelerator._models:
            self._watch(model)
        for owner, names, phase in (
            (accelerator, ("backward",), "backward"),
            (accelerator, ("clip_grad_norm_", "clip_grad_value_"), "optimizer"),
            *((optimizer, ("step", "zero_grad"), "optimizer") for optimizer in accelerator._optimizers),
            *((scheduler, ("step",), "optimizer") for scheduler in accelerator._schedulers),
            (current(), _COLLECTIVES if accelerator.num_processes > 1 else (), "communication"),
        ):
            for name in names:
                self._replace(owner, name, functools.partial(self._timed, phase))
        self._active = True
        self._clock.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._clock.mark("other")
        for loop in self._loops[:1]:  # of a script that takes batches by hand; those inside it end with it
            self._end_step(loop)
        self._active = False
        self._undo.close()
        if kind is None:  # after an error the ranks may not meet any more
            self._report()
        for each in self._reductions:
            each.stop()

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put a timed function in place of one, until the end of the block."""
        own = vars(owner).get(name)
        setattr(owner, name, make(getattr(owner, name)))
        if own is None:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, own)

    # --- while the loop runs ------------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        """A phase begins, and the one around it pauses; but what waiting for data consists of is waiting for data."""
        if phase in _TRAINING and self._loops:
            self._loops[-1].trained = True
        around = self._around()
        self._phases.append("data" if around == "data" else phase)
        self._clock.mark(around)

    def _around(self) -> str:
        return self._phases[-1] if self._phases else "other"

    def _leave(self) -> None:
        self._clock.mark(self._phases.pop())

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._active:  # an iteration that goes on beyond the block
                return function(*args, **kwargs)
            self._enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def _timed_iteration(self, iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(iterate)
        def timed(loader: Any) -> Iterator[Any]:
            batches: Any = iterate(loader)
            fetch = self._timed("data", functools.partial(next, batches, batches))
            loop = _Loop()
            self._mark_and(self._begin_step, loop)
            first = True
            try:
                while (batch := fetch()) is not batches:
                    # A step reaches from one batch to the next; waiting for the first is a part of the first step.
                    if not first:
                        self._end_step(loop)
                        self._begin_step(loop)
                    first = False
                    self._batches += 1
                    yield batch
            finally:
                self._mark_and(self._end_step, loop)
                batches.close()

        return timed

    def _mark_and(self, change: Callable[[_Loop], None], loop: _Loop) -> None:
        if self._active:
            self._clock.mark(self._around())
            change(loop)

    def _begin_step(self, loop: _Loop) -> None:
        if self._active:
            loop.trained = False
            self._loops.append(loop)
            self._clock.open()

    def _end_step(self, loop: _Loop) -> None:
        if not self._active or loop not in self._loops:
            return
        while (inner := self._loops.pop()) is not loop:
            # It goes on while the one around it takes its next batch: they run side by side, and make one step.
            self._loops[-1].trained |= inner.trained
            self._clock.merge()
        self._trained += loop.trained
        self._clock.close(keep=loop.trained and self._trained > self._warmup)
        if loop.trained and self._trained == self._warmup:
            for reductions in self._reductions:
                reductions.begin()

    def _watch(self, model: torch.nn.Module) -> None:
        wrapper = original_of(model)
        reductions = _Reductions(wrapper) if isinstance(wrapper, DistributedDataParallel) else None
        if reductions is not None:
            self._reductions.append(reductions)

        def before(*_: Any) -> None:
            self._enter("forward")

        def after(*_: Any) -> None:
            self._leave()
            if reductions is not None:
                reductions.note()

        self._undo.callback(model.register_forward_pre_hook(before, prepend=True).remove)
        self._undo.callback(model.register_forward_hook(after, always_call=True).remove)

    # --- afterwards ---------------------------------------------------------------------------------------------

    def _own_seconds(self) -> dict[str, float]:
        totals = dict.fromkeys(PHASES, 0.0) | self._clock.totals()
        for each in self._reductions:
            each.catch_up()
        # DDP exchanges gradients inside the backward: what of it the computation does not hide is communication.
        exchanged = min(sum(each.seconds for each in self._reductions), totals["backward"])
        totals["backward"] -= exchanged
        totals["communication"] += exchanged
        return {phase: seconds / max(self.steps, 1) for phase, seconds in totals.items()}

    def _report(self) -> None:
        self.steps = max(self._trained - self._warmup, 0)
        own = self._own_seconds() if self.steps else dict.fromkeys(PHASES, 0.0)
        everyone = current().gather_objects((self.steps, own))
        self.seconds = [seconds for _, seconds in everyone]
        self.steps = max(steps for steps, _ in everyone)
        alone = [sum(seconds.values()) - seconds["communication"] for seconds in self.seconds]
        self.slowest = alone.index(max(alone))
        if self.steps:
            if self._accelerator.is_main_process:
                print_table(self.seconds, self.slowest, self.steps)
                for line in hints(self.seconds[self.slowest], facts_of(self._accelerator)):
                    print(line)
            self._accelerator.log(summary(self.seconds, self.slowest))
        elif self._accelerator.is_main_process:
            print(f"step times: no step was measured, because {self._why_not()}.")

    def _why_not(self) -> str:
        if not self._batches:
            return (
                "no prepared data loader was iterated in the block: pass yours to `prepare`, and start the loop inside"
            )
        if not self._trained:
            return f"none of {self._batches} batches was trained on: call `accelerator.backward` in the loop"
        return (
            f"the loop ended after {self._trained} of {self._warmup} warm-up steps: run more, or pass a smaller "
            "`warmup`"
        )


class _Loop:
    """One iteration over a loader. trained: whether the batch at hand was trained on."""

    trained = False


class _Reductions:
    """How long the exchanges of gradients of one DDP model took beyond the backward that they overlap with."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        measure_every(model, 1)
        self._last = 0
        self.seconds = 0.0
        self.begin()

    def begin(self) -> None:
        """Count from now: not what happened before, of which DDP has written down nothing yet."""
        self.catch_up()
        self.seconds = 0.0

    def stop(self) -> None:
        """Have DDP measure as few iterations as it does by itself: on a GPU, each one waits for the backward before."""
        measure_every(self._model, 100)

    def catch_up(self) -> None:
        logger: Any = self._model.logger
        logger.set_runtime_stats_and_log()
        self.note()

    def note(self) -> None:
        """After a forward, in which DDP wrote down the numbers of the iteration before it."""
        numbers = measured(self._model)
        end = numbers.get("backward_comm_time_end", 0)
        if end == self._last:
            return  # an iteration without an exchange
        self._last = end
        exposed = numbers["backward_comm_time"] - numbers["backward_compute_comm_overlap_time"]
        self.seconds += max(exposed, 0) / 1e9
