"""Which engine spreads the models of this process: what was asked for by arguments or variables, from one table."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.config.environment import parse_flag_from_env
from accelerate.state.engines.base import EngineSetup, Request, settings_of

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig

__all__ = ["ENGINES", "VARIABLES", "EngineRow", "EngineSetup", "Request", "asked", "kind_of", "settings_of"]


class EngineRow(NamedTuple):
    """One engine of the table. It is imported when it is asked for."""

    module: str
    name: str
    # The argument of `Accelerator` that has its settings, the variable by which a launch asks for it, and the axes of a
    # mesh that are its.
    argument: str
    variable: str
    axes: tuple[str, ...] = ()

    def load(self) -> type[EngineSetup]:
        engine: type[EngineSetup] = getattr(import_module(self.module), self.name)
        return engine

    def is_asked_for(self, plugin: Any, mesh: ParallelismConfig | None) -> bool:
        return plugin is not None or parse_flag_from_env(self.variable) or self.is_needed(mesh)

    def is_needed(self, mesh: ParallelismConfig | None) -> bool:
        """Whether an axis of the mesh is made by this engine."""
        return mesh is not None and not set(self.axes).isdisjoint(mesh.active_mesh_dims)


_HERE = "accelerate.state.engines"
ENGINES: list[EngineRow] = [
    EngineRow(f"{_HERE}.fsdp", "FSDPSetup", "fsdp_plugin", "ACCELERATE_USE_FSDP", ("dp_shard", "cp")),
    EngineRow(f"{_HERE}.deepspeed", "DeepSpeedSetup", "deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED"),
    EngineRow(f"{_HERE}.megatron", "MegatronSetup", "megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM"),
]
# They are set, too, by an engine that was asked for by its argument: other libraries look there.
VARIABLES: tuple[str, ...] = tuple(row.variable for row in ENGINES)


def asked(plugins: dict[str, Any], mesh: ParallelismConfig | None, mixed_precision: str) -> EngineSetup:
    """The engine that was asked for; the plain one where none was.

    plugins: by the name of their argument.
    """
    rows = [row for row in ENGINES if row.is_asked_for(plugins.get(row.argument), mesh)]
    if not rows:
        return EngineSetup(Request(None, mesh, False, mixed_precision))
    row, *others = rows
    kind = row.load()
    rivals = [other.load().name for other in others]
    if mesh is not None and not kind.takes_mesh:
        rivals.append("a ParallelismConfig")
    if rivals:
        raise ValueError(f"A model is spread either by {kind.name} or by {rivals[0]}: leave out one of the two.")
    return kind(Request(plugins.get(row.argument), mesh, row.is_needed(mesh), mixed_precision))


def kind_of(argument: str) -> type[EngineSetup]:
    """The engine whose settings an argument of `Accelerator` has; the plain one for other arguments."""
    return next((row.load() for row in ENGINES if row.argument == argument), EngineSetup)
