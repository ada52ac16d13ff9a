"""An engine that spreads models, as it was asked for, and what it wants of the process. The base is the plain case."""

from __future__ import annotations

import dataclasses
import functools
import os
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.comm.torch_dist import join_alone
from accelerate.errors import a_kind_of

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state.accelerator import AcceleratorState
    from accelerate.state.partial import PartialState


class Request(NamedTuple):
    """What an engine is asked to do."""

    # Its plugin as the script gave it; None where the launch, or the mesh, asks for the engine.
    plugin: Any
    mesh: ParallelismConfig | None
    # Whether an axis of the mesh cannot be without it.
    is_needed: bool
    mixed_precision: str


def import_engine(module: str, name: str) -> None:
    """Import an engine that is installed."""
    try:
        import_module(module)
    except Exception as error:
        raise ImportError(
            f"{name} is installed but cannot be imported ({type(error).__name__}: {error}): install it again, for "
            "the torch of this environment."
        ) from error


class EngineSetup:
    """One engine. This one is none: each process has the whole model, and DDP if there are several.

    name: for people. axis: the axis of a mesh that is as long as the run, where no size was given.
    takes_mesh: whether a `ParallelismConfig` may be given beside it. cuts_sequences: whether it has an axis `sp`.
    """

    name = "DDP"
    axis = "dp_replicate"
    takes_mesh = True
    cuts_sequences = False

    def __init__(self, request: Request) -> None:
        """Check what was asked for, and fill in the rest. Nothing outside of the plugin is changed."""

    def plugins(self) -> dict[str, Any]:
        """The settings that a second Accelerator is compared with, by the name of their argument."""
        return {}

    def before_process(self, cpu: bool) -> None:
        """Told before the process has a device. cpu: whether the script asked for the CPU."""

    def set_up(self, partial: PartialState) -> None:
        """Give the process what the engine looks for in it."""

    def show(self, state: AcceleratorState) -> None:
        """Put the settings where scripts look for them, and the label that `distributed_type` reports."""

    @classmethod
    def check_second(cls, argument: str, plugin: Any, state: AcceleratorState) -> None:
        """Refuse the plugin of a second Accelerator, which shares the engine of the first, if it asks for another."""
        first, settings = state._asked.get(argument, (None, None))
        if settings is None:
            state._refuse(f"{argument}={type(plugin).__name__}(...) (it has none)")
        if not dataclasses.is_dataclass(plugin):
            state._refuse(f"{argument}={type(plugin).__name__}(...) (it is {a_kind_of(first)})")
        if different := differences(plugin, first, settings):
            state._refuse(f"{argument} with {', '.join(different)}")


def join_a_group(partial: PartialState) -> None:
    """Make a process group of one process, for an engine that wants a group also there."""
    if partial.backend is None:
        set_world_variables(partial)
        partial.backend = join_alone(partial.device_kind.name, partial.device_kind.backend)


def set_world_variables(partial: PartialState) -> None:
    """Set the variables of torchrun that are missing, where another launcher, or none, has started the process."""
    os.environ.update({name: value for name, value in partial.world.variables().items() if name not in os.environ})


def settings_of(plugin: Any) -> dict[str, Any]:
    """The fields of a plugin as they are now, whatever is done with it later."""
    return {field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin) if field.compare}


def differences(plugin: Any, first: Any, settings: dict[str, Any]) -> list[str]:
    """What is asked for by a second plugin. settings: what the first was asked for, before anything was filled in."""
    return [
        f"{name}={value!r} (it is {settings.get(name)!r})"
        for name, value in settings_of(plugin).items()
        if not _same(value, settings.get(name)) and not _same(value, getattr(first, name, None))
    ]


def _same(value: Any, other: Any) -> bool:
    """Whether two settings mean the same. Functions do that were made twice from the same lines, as policies are."""
    return bool(_comparable(value) == _comparable(other))


def _comparable(value: Any) -> Any:
    if isinstance(value, functools.partial):
        keywords = {name: _comparable(argument) for name, argument in value.keywords.items()}
        return _comparable(value.func), [_comparable(argument) for argument in value.args], keywords
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, value.__defaults__, value.__kwdefaults__, cells
    return value
