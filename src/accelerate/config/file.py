"""The config file: where it is, what is in it, reading and writing it (YAML or JSON)."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.config.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accelerate.config.migrate import migrate
from accelerate.config.options import FAMILIES, FILE_ONLY, OPTIONS, SECTIONS
from accelerate.constants import SAGEMAKER_PYTHON_VERSION, SAGEMAKER_PYTORCH_VERSION, SAGEMAKER_TRANSFORMERS_VERSION
from accelerate.errors import a_kind_of, warn
from accelerate.text import did_you_mean


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the default file: in `HF_HOME`, else in `XDG_CACHE_HOME/huggingface`, else in `~/.cache`."""
    environ = os.environ if environ is None else environ
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "accelerate"


def default_path(environ: Mapping[str, str] | None = None) -> Path:
    """The default file: JSON where only that is there, else YAML, whether it is there or not."""
    yaml_file, json_file = folder(environ) / "default_config.yaml", folder(environ) / "default_config.json"
    return json_file if json_file.is_file() and not yaml_file.is_file() else yaml_file


@dataclass
class BaseConfig:
    """Settings that every config file has.

    Args:
        compute_environment: where the run takes place.
        distributed_type: how the processes work together.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        use_cpu: run on the CPU even if there is an accelerator.
        debug: compare the arguments of collectives on all ranks.
    """

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = _member(ComputeEnvironment, self.compute_environment, "compute_environment")
        types = (
            SageMakerDistributedType
            if self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
            else DistributedType
        )
        self.distributed_type = _member(types, self.distributed_type, "distributed_type")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data, without those that are None or empty."""
        fields = {name: _plain(value) for name, value in vars(self).items()}
        return {name: value for name, value in fields.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Bring the contents of a config file up to date, and fill in what every config needs.

        Args:
            config_dict: the contents.

        Returns:
            The new contents.
        """
        settings, _ = migrate(dict(config_dict))
        settings = {name: value for name, value in settings.items() if value is not None}
        settings.setdefault("compute_environment", ComputeEnvironment.LOCAL_MACHINE.value)
        settings.setdefault("use_cpu", False)
        settings.setdefault("debug", False)
        settings.setdefault("distributed_type", _distributed_type(settings))
        if settings["compute_environment"] == ComputeEnvironment.LOCAL_MACHINE.value:
            settings.setdefault("num_processes", -1 if settings["distributed_type"] != "NO" else 1)
        if not (settings.get("deepspeed_config") or {}).get("deepspeed_config_file"):
            # With a file of DeepSpeed, the precision is what that file says.
            settings.setdefault("mixed_precision", "no")
        return {"mixed_precision": None, **settings}

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str] | None = None) -> BaseConfig:
        """Read a config from JSON.

        Args:
            json_file: the path of the file. By default that of the default config.

        Returns:
            The config.

        Raises:
            ValueError: the file has an unknown key, or lacks one.
        """
        path = Path(json_file or folder() / "default_config.json")
        return cls._from_content(read(path), path)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | os.PathLike[str] | None = None) -> BaseConfig:
        """Read a config from YAML.

        Args:
            yaml_file: the path of the file. By default that of the default config.

        Returns:
            The config.

        Raises:
            ValueError: the file has an unknown key, or lacks one.
        """
        path = Path(yaml_file or folder() / "default_config.yaml")
        return cls._from_content(read(path), path)

    @classmethod
    def _from_content(cls, content: dict[str, Any], path: Path) -> BaseConfig:
        fields = dataclasses.fields(cls)
        known = {field.name for field in fields}
        unknown = sorted(set(migrate(content)[0]) - known)
        if unknown:
            words = ", ".join(f"{key}{did_you_mean(key, known)}" for key in map(str, unknown))
            raise ValueError(
                f"The config file {path} has unknown keys: {words}; correct or remove them, or update accelerate."
            )
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        try:
            settings = cls.process_config(content)
            if missing := sorted(required - set(settings)):
                raise ValueError(f"there is no {', '.join(missing)}: add what is missing.")
            return cls(**settings)
        except ValueError as error:
            raise ValueError(f"In the config file {path}, {error}") from None

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write the config as JSON.

        Args:
            json_file: the path of the file.
        """
        Path(json_file).write_text(_as_json(self.to_dict()), encoding="utf-8")

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write the config as YAML.

        Args:
            yaml_file: the path of the file.
        """
        Path(yaml_file).write_text(_as_yaml(self.to_dict()), encoding="utf-8")


@dataclass
class ClusterConfig(BaseConfig):
    """Settings of a run on your own machines, besides those of `BaseConfig`.

    Args:
        num_processes: the number of processes on all machines.
        machine_rank: the number of this machine, from 0.
        num_machines: the number of machines.
        gpu_ids: the GPUs of this machine to use, such as "0,2". By default all.
        main_process_ip: the address of the machine with rank 0.
        main_process_port: its port; 0 for any free one.
        rdzv_backend: how machines find each other: "static", "c10d" or another that torchrun knows.
        same_network: whether all machines reach each other directly.
        main_training_function: the function of the script to call on each TPU core.
        enable_cpu_affinity: bind each process to the CPU cores closest to its GPU.
        hang_timeout: after how many seconds of waiting to report which rank waits where; 0 for never.
        hang_timeout_action: what to do then.
        preemption: what to do when SIGTERM or SIGUSR1 arrives.
        resume: whether `accelerator.resume()` loads a checkpoint.
        fp8_config: the section of fp8.
        deepspeed_config: the section of DeepSpeed.
        fsdp_config: the section of FSDP.
        parallelism_config: the section of the device mesh.
        megatron_lm_config: the section of Megatron-LM.
        mpirun_config: the section of MPI.
        downcast_bf16: on XLA devices with bf16, keep parameters in bf16 as well.
        tpu_name: the name of a TPU pod.
        tpu_zone: its zone.
        tpu_use_cluster: run on all machines of the pod.
        tpu_use_sudo: use sudo there.
        command_file: a file of commands for `accelerate tpu-config`.
        commands: such commands.
        tpu_vm: the machines of the pod.
        tpu_env: variables to set there, as `NAME=value`.
        dynamo_config: the section of `torch.compile`.
    """

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    hang_timeout: float | None = None
    hang_timeout_action: str | None = None
    preemption: str | None = None
    resume: str | None = None

    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False

    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None

    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for section in SECTIONS:
            if getattr(self, section) is None:
                setattr(self, section, {})

    def unknown_in_sections(self) -> list[str]:
        """Return the keys of sections that belong to no setting, each with its section."""
        return [
            f"{section}.{key}"
            for section, family in SECTIONS.items()
            for key in getattr(self, section)
            if family.option_for_key(key) is None
        ]

    def values(self) -> dict[str, Any]:
        """Return the settings by their name on the command line."""
        found: dict[str, Any] = {}
        for family in (*FAMILIES, FILE_ONLY):
            for option in family.options:
                if not family.section and option.file_key and getattr(self, option.file_key, None) is not None:
                    found[option.name] = _plain(getattr(self, option.file_key))
        for section, family in SECTIONS.items():
            for key, value in getattr(self, section).items():
                known = family.option_for_key(key)
                if known is not None and value is not None:
                    found[known.name] = value
        return found


@dataclass
class SageMakerConfig(BaseConfig):
    """Settings of a run on Amazon SageMaker, besides those of `BaseConfig`.

    Args:
        ec2_instance_type: the type of instance.
        iam_role_name: the IAM role that runs the job.
        image_uri: the docker image. By default that of SageMaker.
        profile: the profile of your AWS configuration.
        region: the region.
        num_machines: the number of instances.
        gpu_ids: accepted as in the 1.15 release.
        base_job_name: what the names of jobs begin with.
        pytorch_version: the version of torch of SageMaker's image.
        transformers_version: the version of transformers of SageMaker's image.
        py_version: the version of Python of SageMaker's image.
        sagemaker_inputs_file: a table of inputs: names and locations, with tabs between them.
        sagemaker_metrics_file: a table of metrics: names and regular expressions, with tabs between them.
        additional_args: more arguments for the estimator.
        dynamo_config: the section of `torch.compile`.
        enable_cpu_affinity: bind each process to the CPU cores closest to its GPU.
    """

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = f"accelerate-sagemaker-{num_machines}"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamo_config is None:
            self.dynamo_config = {}


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> BaseConfig:
    """Read a config file, YAML or JSON.

    Args:
        config_file: the path of the file. By default that of the default config.
    """
    path = default_path() if config_file is None else Path(config_file).expanduser()
    return of_content(read(path), path)


def of_content(content: dict[str, Any], path: Path) -> BaseConfig:
    """The config that the content of a file is."""
    return _class_for(content)._from_content(content, path)


def _class_for(content: Mapping[str, Any]) -> type[BaseConfig]:
    sagemaker = content.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value
    return SageMakerConfig if sagemaker else ClusterConfig


def read(path: Path, tell: Callable[[str], None] = warn) -> dict[str, Any]:
    """The content of a file as it stands. YAML reads JSON too, so that a name that promises YAML may hold either.

    tell: what is called with a sentence about each key that stands twice.
    """
    if not path.is_file():
        if path.is_dir():
            raise IsADirectoryError(f"The config file {path} is a folder: give a file, such as `{path / 'my.yaml'}`.")
        raise FileNotFoundError(
            f"There is no config file {path}: give another one with `--config_file`, or make one with "
            "`accelerate config`."
        )
    try:
        text = path.read_text(encoding="utf-8")
        content = _from_json(text) if path.suffix == ".json" else _from_yaml(text, path, tell)
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at position {error.start}"
        raise ValueError(f"The config file {path} is not UTF-8 text ({byte}): save it as UTF-8.") from None
    except _Unreadable as problem:
        raise ValueError(f"The config file {path} is not {problem}") from None
    if content is None:
        raise ValueError(
            f"The config file {path} is empty: make one with `accelerate config`, or give another one with "
            "`--config_file`."
        )
    if not isinstance(content, dict):
        raise ValueError(f"The config file {path} should hold names and values, but holds {type(content).__name__}.")
    for section in SECTIONS:
        inside = content.get(section)
        if not isinstance(inside, dict | None):
            kind = type(inside).__name__
            raise ValueError(f"`{section}` in {path} should hold names and values, but holds {kind}.")
        _check_keys(inside or {}, f"`{section}` in {path}")
    _check_keys(content, f"The config file {path}")
    return content


class _Unreadable(Exception):
    """What is wrong with a text: its format, where, why, and what to look for."""


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _Unreadable(
            f"JSON at line {error.lineno}, column {error.colno} ({error.msg}): check commas, quotes and brackets there "
            "and in the lines before."
        ) from None


def _from_yaml(text: str, path: Path, tell: Callable[[str], None]) -> Any:
    import yaml

    around = "check the indentation (spaces alone), colons, quotes and brackets there and in the lines before."
    try:
        # Written in C where it is there: ten times as fast.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        if (document := loader.get_single_node()) is None:
            return None
        for key, lines in _repeated(document):
            on = " and ".join(map(str, lines))
            tell(f"The config file {path} has `{key}` on lines {on}, and the last one counts: keep one of them.")
        return loader.construct_document(document)
    except yaml.MarkedYAMLError as error:
        mark, why = error.problem_mark, " ".join(str(error.problem).split())
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise _Unreadable(f"YAML{where} ({why}): {around}") from None
    except yaml.reader.ReaderError as error:
        raise _Unreadable(f"YAML at position {error.position} ({error.reason}): remove that character.") from None


def _repeated(document: Any) -> Iterator[tuple[str, list[int]]]:
    """The keys of a YAML document, and of its sections, that stand there more than once, with their lines."""
    whole = [document] if document.id == "mapping" else []
    sections = [value for mapping in whole for _, value in mapping.value if value.id == "mapping"]
    for mapping in [*whole, *sections]:
        lines: dict[str, list[int]] = {}
        for key, _ in mapping.value:
            lines.setdefault(str(key.value), []).append(key.start_mark.line + 1)
        yield from ((key, where) for key, where in lines.items() if len(where) > 1)


def _check_keys(content: Mapping[Any, Any], where: str) -> None:
    """Refuse keys that are not text, which could not be sorted among the others."""
    for key in content:
        if not isinstance(key, str):
            raise ValueError(
                f"{where} has the key {key!r}, {a_kind_of(key)}, where a name belongs: correct it, or put it in "
                "quotes if YAML takes it for something else (on, off, yes and no are true and false to it)."
            )


def write(content: dict[str, Any], path: Path) -> None:
    """Writes JSON to a name that ends in `.json`, else YAML; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content.get("num_processes") == -1:  # nobody has said how many
        content = {name: value for name, value in content.items() if name != "num_processes"}
    path.write_text(_as_json(content) if path.suffix == ".json" else _as_yaml(content), encoding="utf-8")


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _as_yaml(content: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(content))


def _distributed_type(settings: Mapping[str, Any]) -> str:
    """What a file without a distributed type means."""
    for section, kind in (
        ("fsdp_config", "FSDP"),
        ("deepspeed_config", "DEEPSPEED"),
        ("megatron_lm_config", "MEGATRON_LM"),
    ):
        if settings.get(section):
            return kind
    try:
        processes = OPTIONS["num_processes"].read(settings.get("num_processes", 1))
    except ValueError as error:
        raise ValueError(f"`num_processes` {error}.") from None
    if processes < 2:
        return "NO"
    return "MULTI_CPU" if settings.get("use_cpu") else "MULTI_GPU"


def _member(kind: type[enum.Enum], value: Any, key: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        meant = did_you_mean(str(value), [str(member.value) for member in kind])
        raise ValueError(f"`{key}` is {value!r}{meant}: choose one of {known}.") from None


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value
