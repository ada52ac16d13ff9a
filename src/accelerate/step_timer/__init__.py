"""Where the time of training steps goes: `timer` takes the times, by `clocks`, and `table` shows them."""

from accelerate.step_timer.timer import StepTimer

__all__ = ["StepTimer"]
