"""The settings of one launch, each with where its value came from: a flag, the file, the machine, or the default."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.config import file as config_file
from accelerate.config.migrate import migrate
from accelerate.config.options import FAMILIES, OPTIONS, SECTIONS
from accelerate.environments import World
from accelerate.launch import machine
from accelerate.launch.hostfile import Hosts
from accelerate.text import did_you_mean

# At most one of each line may be asked for.
_ONE_OF = (
    ("multi_gpu", "tpu", "cpu"),
    ("use_deepspeed", "use_fsdp", "use_megatron_lm", "multi_gpu"),
    ("use_deepspeed", "use_megatron_lm", "tpu"),
)

# What a distributed type in the file stands for, unless a flag says otherwise.
_FILE_TYPES = {
    "MULTI_CPU": "cpu",
    "DEEPSPEED": "use_deepspeed",
    "FSDP": "use_fsdp",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
}


@dataclass(frozen=True)
class Setting:
    """A value, where it came from (flag, file, detected, default) and, where that needs words, why."""

    value: Any
    source: str
    reason: str = ""


@dataclass
class Settings:
    """All settings of a launch. `settings.num_processes` is a value, `settings.of["num_processes"]` says whence."""

    script: str
    script_args: list[str]
    of: dict[str, Setting] = field(default_factory=dict)
    world: World | None = None
    devices: machine.Accelerators = field(default_factory=lambda: machine.Accelerators("cpu", 0, ""))
    file: config_file.BaseConfig | None = None
    # The machines that one of DeepSpeed's own launchers starts; None where each machine starts its own processes.
    hosts: Hosts | None = None
    notes: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["of"][name].value
        except KeyError:
            raise AttributeError(name) from None

    def put(self, name: str, value: Any, source: str, reason: str = "") -> None:
        self.of[name] = Setting(value, source, reason)

    @property
    def least_machines(self) -> int:
        """As few machines as this can do without the others."""
        return int(self.num_machines) if self.nnodes is None else int(str(self.nnodes).split(":")[0])

    @property
    def local_processes(self) -> int:
        """Processes on this machine."""
        return int(self.num_processes) // int(self.num_machines)

    @property
    def on_cpu(self) -> bool:
        """Whether the processes compute on the CPU."""
        return bool(self.cpu) or not (self.devices.count or self.tpu)

    @property
    def starts_all_machines(self) -> bool:
        """Whether this launch starts the processes of other machines too."""
        if self.mpirun_hostfile is not None or (self.tpu and self.tpu_use_cluster):
            return True
        return self.hosts is not None and self.deepspeed_multinode_launcher != "nossh"

    @property
    def elastic(self) -> bool:
        """Whether torch elastic starts the processes."""
        if self.world is not None or self.mpirun_hostfile is not None or (self.tpu and self.tpu_use_cluster):
            return False
        engine = not self.tpu and (self.multi_gpu or self.use_fsdp or self.use_megatron_lm or self.use_deepspeed)
        # What nobody else can do, for one process either.
        service = self.max_restarts or self.tee != "0"
        return bool(engine or service or self.num_processes > 1)

    def namespace(self) -> argparse.Namespace:
        """The values as attributes, for functions that take parsed arguments."""
        values = {name: setting.value for name, setting in self.of.items()}
        return argparse.Namespace(
            **values, use_cpu=self.cpu, training_script=self.script, training_script_args=self.script_args
        )


def read_flags(settings: Settings, args: argparse.Namespace) -> None:
    """Takes what was given on the command line, and refuses what contradicts itself."""
    given: set[str] = getattr(args, "nondefault", set())
    for name, option in OPTIONS.items():
        value = getattr(args, name, option.default)
        if name in given or value != option.default:
            settings.put(name, option.check(value), "flag")
        else:
            settings.put(name, option.default, "default")
    for group in _ONE_OF:
        asked = [name for name in group if settings.of[name].value]
        if len(asked) > 1:
            raise ValueError(f"`--{asked[0]}` and `--{asked[1]}` exclude each other: give one of them.")
    if settings.module and settings.no_python:
        raise ValueError("`--module` and `--no_python` exclude each other: a module is run by Python.")


def read_file(settings: Settings, environ: Mapping[str, str]) -> None:
    """Takes what the config file says and no flag does."""
    path = Path(settings.config_file).expanduser() if settings.config_file else config_file.default_path(environ)
    if not settings.config_file and not path.is_file():
        return
    content = config_file.read(path, settings.notes.append)
    settings.file = config_file.of_content(content, path)
    settings.put(
        "config_file",
        str(path),
        "flag" if settings.config_file else "detected",
        "" if settings.config_file else "it is there",
    )
    if not isinstance(settings.file, config_file.ClusterConfig):
        return
    written, changes = migrate(content)
    if changes:
        settings.notes.append(f"{path} is of an earlier release: `accelerate config update` brings it up to date.")
    unknown = settings.file.unknown_in_sections()
    if unknown:
        words = ", ".join(f"{key}{_known_key_near(key)}" for key in unknown)
        settings.notes.append(f"{path} has keys without any effect: {words}.")
    top_level = {option.name for family in FAMILIES if not family.section for option in family.options}
    for name, value in settings.file.values().items():
        option = OPTIONS.get(name)
        in_file = name not in top_level or (option is not None and option.file_key in written)
        if option is not None and in_file and settings.of[name].source == "default":
            try:
                settings.put(name, option.read(value), "file")
            except ValueError as error:
                raise ValueError(f"`{option.file_key}` in {path} {error}.") from None
    _read_distributed_type(settings, str(settings.file.distributed_type.value), "distributed_type" in written)


def _known_key_near(unknown: str) -> str:
    section, _, key = unknown.partition(".")
    family = SECTIONS[section]
    names = [option.name for option in family.options]
    return did_you_mean(key, [*names, *(name.removeprefix(family.prefix) for name in names)])


def _read_distributed_type(settings: Settings, kind: str, written: bool) -> None:
    name = _FILE_TYPES.get(kind, "multi_gpu" if kind.startswith("MULTI_") else "")
    # What a flag excludes: `--cpu` says nothing against FSDP, which runs there, too.
    others = {other for group in _ONE_OF if name in group for other in group}
    if any(settings.of[other].source == "flag" and settings.of[other].value for other in others):
        return
    # A file that only says how many processes there are does not ask for GPUs.
    if name and (written or name != "multi_gpu"):
        settings.put(name, True, "file", f"distributed_type is {kind}")
