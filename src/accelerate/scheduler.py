"""The learning-rate scheduler a script gets back from `prepare`: it follows its optimizer."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim.lr_scheduler import PolynomialLR

from accelerate.errors import warn
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState, PartialState

# Where torch's schedulers keep the number of steps they are laid out for.
_HORIZONS = ("total_steps", "T_max")


def horizon(scheduler: Any) -> int | None:
    """Return after how many of its steps a schedule ends, or None if that is not known.

    Args:
        scheduler: the scheduler.
    """
    for name in _HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int):
            return value
    if isinstance(scheduler, PolynomialLR):  # others with `total_iters` warm up, and training goes on after them
        return scheduler.total_iters
    for function in getattr(scheduler, "lr_lambdas", ()):
        # The way transformers' get_scheduler builds its schedules: a partial with the number of steps.
        value = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(value, int):
            return value
    return None


def moves(each: int) -> str:
    """Say how far a prepared scheduler goes when its optimizer has stepped.

    Args:
        each: how many steps those are.
    """
    per = "process" if each == PartialState().num_processes else "share of the data"
    return f"a prepared scheduler moves {each} steps (one per {per}) each time"


def takes_metric(scheduler: Any) -> bool:
    """Return whether a scheduler is told a measured value at each step, as `ReduceLROnPlateau` is.

    Args:
        scheduler: the scheduler.
    """
    try:
        names = inspect.signature(scheduler.step).parameters
    except (AttributeError, TypeError, ValueError):  # it has none that Python can look at
        return False
    return "metrics" in names or "metric" in names


class StepsOfLoops:
    """Counts the optimizer steps within loops over prepared loaders since the last step of a scheduler.

    Args:
        gradient_state: knows whether there is a loop.
    """

    def __init__(self, gradient_state: GradientState) -> None:
        self._gradient_state = gradient_state
        self.count = 0

    def __call__(self) -> None:
        self.count += self._gradient_state.in_dataloader


class AcceleratedScheduler:
    """A scheduler that steps only when its optimizers did.

    Unless batches are split, each optimizer step consumes as many batches as there are ranks (those that work on the
    same one count once), so the schedule advances by that many steps: write it for one process, and it fits any number.
    One that is told a metric at each step advances by one.

    Args:
        scheduler: the scheduler.
        optimizers: the optimizers it belongs to.
        step_with_optimizer: step only when the optimizers did, once per share of the data (set by `prepare`);
            otherwise at every call.
        split_batches: whether the loaders split batches among the ranks, so that the schedule advances by one.
    """

    _accelerate_kind = "schedulers"
    # Whether it is in the files of an engine, and has none of its own in a checkpoint.
    saved_by_engine = False

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | list[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: list[AcceleratedOptimizer] = (
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        )
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state: GradientState = GradientState()
        self._has_total_steps = hasattr(scheduler, "total_steps")
        self._has_said_end = False
        self._optimizer_steps = 0
        self._epoch: StepsOfLoops | None = None
        self._move_by(1 if split_batches else PartialState().num_processes)

    def _move_by(self, each: int) -> None:
        """Set how many steps of the schedule one of the optimizers is. One that moves as written was not divided."""
        # A metric that is measured once counts once: else a plateau would be seen too early.
        self._steps_each_time = each = 1 if takes_metric(self.scheduler) else each
        self._horizon = horizon(self.scheduler) if each > 1 else None

    def _watch_epochs(self) -> None:
        """Look, until it is known, whether the script steps once per batch, or once per epoch, which is multiplied."""
        if self._steps_each_time > 1 and self.step_with_optimizer:
            self._epoch = StepsOfLoops(self.gradient_state)
            for optimizer in self.optimizers:
                optimizer.after_step += (self._epoch,)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers have stepped.

        Args:
            args: positional arguments for the scheduler.
            kwargs: keyword arguments for the scheduler.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        if any(optimizer.holds_schedule for optimizer in self.optimizers):
            return
        if self._horizon is not None:
            self._check_horizon()
        if self._epoch is not None:
            self._check_epoch()
        for _ in range(self._steps_each_time):
            # OneCycleLR refuses to go past its end, which the last partial round may reach early.
            if not self._has_total_steps or self.scheduler.last_epoch < self.scheduler.total_steps:
                self.scheduler.step(*args, **kwargs)
            elif not self._has_said_end:
                self._has_said_end = True
                self._say_end()

    def _say_end(self) -> None:
        """On one process nobody else has moved the schedule: torch would end the training here."""
        if PartialState().num_processes == 1:
            warn(
                f"This {type(self.scheduler).__name__} has come to its end after {self.scheduler.total_steps} steps, "
                "but training continues, and its learning rate stays what it is: make `total_steps` the number of all "
                "optimizer steps."
            )

    def _check_epoch(self) -> None:
        """Within a loop, also at every few batches, the schedule counts batches, of which all processes use up more."""
        assert self._epoch is not None
        steps, self._epoch.count = self._epoch.count, 0
        inside = self.gradient_state.in_dataloader
        if not inside and steps < 2:
            return  # before the first epoch, or after one of a single step
        for optimizer in self.optimizers:
            optimizer.after_step = tuple(each for each in optimizer.after_step if each is not self._epoch)
        self._epoch = None
        if not inside and PartialState().is_main_process:
            warn(
                f"This {type(self.scheduler).__name__} is stepped once after {steps} optimizer steps, behind the loop "
                f"over the loader, but {moves(self._steps_each_time)}: if it counts epochs, pass "
                "`step_scheduler_with_optimizer=False` to the Accelerator; otherwise step it after each optimizer step."
            )

    def _check_horizon(self) -> None:
        """The schedule is over, yet training goes on: most likely it was laid out for one process already."""
        assert self._horizon is not None
        self._optimizer_steps += 1
        # Epochs that do not divide evenly go a little past the end; one that was divided already goes to twice it.
        each = self._steps_each_time
        if self._optimizer_steps * each < 1.5 * self._horizon + each:
            return
        from accelerate.data_loader.samplers import BatchSamplerShard  # seldom: the schedule is long over

        shard = getattr(self.gradient_state.active_dataloader, "batch_sampler", None)
        if isinstance(shard, BatchSamplerShard):
            # With few batches for the processes, an epoch is far more steps of the schedule than it has batches.
            longer = len(shard) * each / max(shard.total_length, 1)
            if self._optimizer_steps * each < 1.5 * longer * self._horizon + each:
                return
        if PartialState().is_main_process:
            warn(
                f"The learning-rate schedule of {self._horizon} steps ended after {self._horizon // each} optimizer "
                f"steps, but training continues: {moves(each)}. "
                "If it should last longer, give it the number of steps of a single process, or pass "
                "`step_scheduler_with_optimizer=False` to the Accelerator."
            )
        self._horizon = None

    def get_last_lr(self) -> Any:
        """Return the last learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the wrapped scheduler.

        Args:
            state_dict: the state.
        """
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> Any:
        """Compute the learning rates as the wrapped scheduler does."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Print the learning rates as the wrapped scheduler does.

        Args:
            args: positional arguments for the scheduler.
            kwargs: keyword arguments for the scheduler.
        """
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
