"""Who am I: the state of this process, shared by every object that asks."""

from accelerate.config.enums import DistributedType
from accelerate.per_rank import ThreadLocalSharedDict
from accelerate.state.accelerator import AcceleratorState
from accelerate.state.gradient import GradientState
from accelerate.state.partial import PartialState
from accelerate.state.processes import do_nothing

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
]


def is_initialized() -> bool:
    """Tell whether an `Accelerator` has been created in this process."""
    return AcceleratorState._shared_state != {}
