"""Every setting of a run, declared once.

Its flag, its place in the config file, its variable, its question and its help all come from the declaration.
"""

from __future__ import annotations

from accelerate.config.options.base import FLAG, Family, Kind, Option
from accelerate.config.options.compiling import DYNAMO, FP8
from accelerate.config.options.engines import DEEPSPEED, MEGATRON
from accelerate.config.options.launching import (
    AWS,
    DISTRIBUTED,
    FILE_ONLY,
    GENERAL,
    HARDWARE,
    MPI,
    PARADIGMS,
    RESOURCES,
    TPU,
)
from accelerate.config.options.sharding import FSDP, PARALLELISM

__all__ = [
    "FAMILIES",
    "FILE_ONLY",
    "FLAG",
    "OPTIONS",
    "SECTIONS",
    "Family",
    "Kind",
    "Option",
    "family_of",
    "option",
    "variable",
]

# In the order of the help.
FAMILIES: tuple[Family, ...] = (
    GENERAL,
    HARDWARE,
    RESOURCES,
    DYNAMO,
    PARADIGMS,
    DISTRIBUTED,
    TPU,
    DEEPSPEED,
    FSDP,
    MEGATRON,
    FP8,
    AWS,
    MPI,
    PARALLELISM,
)

OPTIONS: dict[str, Option] = {option.name: option for family in FAMILIES for option in family.options}
SECTIONS: dict[str, Family] = {family.section: family for family in FAMILIES if family.section}
_FAMILY_OF = {option.name: family for family in FAMILIES for option in family.options}


def option(name: str) -> Option:
    """The declaration of a setting."""
    return OPTIONS[name]


def variable(name: str) -> str:
    """The variable that carries a setting to the workers."""
    return family_of(name).variable_of(OPTIONS[name])


def family_of(name: str) -> Family:
    """The family a setting belongs to."""
    return _FAMILY_OF[name]
