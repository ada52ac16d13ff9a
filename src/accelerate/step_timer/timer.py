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
from accelerate.step_timer.table import PHASES, print_table, summary

_COLLECTIVES = ("barrier", "gather", "all_reduce", "broadcast", "scatter", "gather_objects", "broadcast_objects")


class StepTimer:
    """A context around a training loop (see `Accelerator.step_timer`).

    After the block: steps: how many were measured. seconds: for each rank, by phase, the mean of a step.
    slowest: the rank whose own work, without waiting for others, takes longest.
    """

    def __init__(self, accelerator: Any, warmup: int = 1) -> None:
        if warmup < 0:
            raise ValueError(f"warmup is {warmup}: give the number of steps to leave out, 0 or more.")
        self.steps = 0
        self.seconds: list[dict[str, float]] = []
        self.slowest = 0
        self._accelerator = accelerator
        self._warmup = warmup
        self._clock = HostClock()
        self._begun = -1  # the number of the step at hand
        self._phases: list[str] = []
        self._reductions: list[_Reductions] = []
        self._undo = ExitStack()
        self._active = False

    def __enter__(self) -> StepTimer:
        accelerator = self._accelerator
        self._clock = clock_for(accelerator.device)
        self._begun = -1  # a timer may be used again, and then measures anew
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
        self._active = False
        self._undo.close()
        if kind is None:  # after an error the ranks may not meet any more
            self._report()

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
        phases = self._phases
        around = phases[-1] if phases else "other"
        phases.append("data" if around == "data" else phase)
        self._clock.mark(around)

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
            try:
                while (batch := fetch()) is not batches:
                    self._begin_step()
                    yield batch
            finally:
                batches.close()

        return timed

    def _begin_step(self) -> None:
        if self._active:
            self._begun += 1
            if self._begun == self._warmup:
                self._clock.begin()
                for reductions in self._reductions:
                    reductions.begin()

    def _watch(self, model: torch.nn.Module) -> None:
        wrapper = getattr(model, "_orig_mod", model)
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
        # DDP exchanges gradients inside the backward: what of it the computation does not hide is communication.
        exchanged = min(sum(each.seconds for each in self._reductions), totals["backward"])
        totals["backward"] -= exchanged
        totals["communication"] += exchanged
        return {phase: seconds / max(self.steps, 1) for phase, seconds in totals.items()}

    def _report(self) -> None:
        self.steps = max(self._begun - self._warmup + 1, 0)
        own = self._own_seconds() if self.steps else dict.fromkeys(PHASES, 0.0)
        everyone = current().gather_objects((self.steps, own))
        self.seconds = [seconds for _, seconds in everyone]
        self.steps = max(steps for steps, _ in everyone)
        alone = [sum(seconds.values()) - seconds["communication"] for seconds in self.seconds]
        self.slowest = alone.index(max(alone))
        if self._accelerator.is_main_process:
            print_table(self.seconds, self.slowest, self.steps)
        if self.steps:
            self._accelerator.log(summary(self.seconds, self.slowest))


class _Reductions:
    """How long the exchanges of gradients of one DDP model took beyond the backward that they overlap with."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._logger: Any = model.logger
        # DDP measures some iterations by itself; here, each of them.
        model._set_ddp_runtime_logging_sample_rate(1)
        self._last = 0
        self.seconds = 0.0

    def begin(self) -> None:
        self.seconds = 0.0

    def note(self) -> None:
        """After a forward, in which DDP wrote down the numbers of the iteration before it."""
        numbers = self._logger._get_ddp_logging_data().ints_map
        end = numbers.get("backward_comm_time_end", 0)
        if end == self._last:
            return  # an iteration without an exchange
        self._last = end
        exposed = numbers["backward_comm_time"] - numbers["backward_compute_comm_overlap_time"]
        self.seconds += max(exposed, 0) / 1e9
