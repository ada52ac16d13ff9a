"""Settings -> the variables that carry them to the workers. Pure: takes anything with the settings as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.config.options import SECTIONS, Family, option, variable
from accelerate.config.options.compiling import DYNAMO, FP8
from accelerate.config.options.sharding import NEEDS_AXIS, PARALLELISM
from accelerate.launch.machine import Accelerators


def variables(values: Any, devices: Accelerators) -> dict[str, str]:
    """Everything the workers are told, whatever starts them."""
    env = {**precision(values), **_switches(values)}
    if not getattr(values, "use_deepspeed", False) or str(getattr(values, "dynamo_backend", "no")).lower() != "no":
        env.update(_family(values, DYNAMO))
    threads = getattr(values, "num_cpu_threads_per_process", None)
    if threads is not None:
        env[variable("num_cpu_threads_per_process")] = str(threads)
    if getattr(values, "gpu_ids", None) not in (None, "all"):
        env[devices.visible_variable] = str(values.gpu_ids)
    for family in SECTIONS.values():
        if family.switch and family is not PARALLELISM and getattr(values, family.switch, False):
            env[f"ACCELERATE_{family.switch.upper()}"] = "true"
            env.update(_family(values, family))
    if getattr(values, "use_deepspeed", False):
        env["ACCELERATE_CONFIG_DS_FIELDS"] = deepspeed_fields(values)
    env.update(parallelism(values))
    return env


def precision(values: Any) -> dict[str, str]:
    """The number format, and under fp8 all that belongs to it."""
    mode = str(getattr(values, "mixed_precision", None) or "no").lower()
    env = {variable("mixed_precision"): mode}
    return {**env, **fp8(values)} if mode == "fp8" else env


def fp8(values: Any, *, only_given: bool = False) -> dict[str, str]:
    """The settings of fp8; with `only_given` without those that nobody has said anything about."""
    absent = {opt.name for opt in FP8.options if getattr(values, opt.name, None) is None} if only_given else set()
    env = _family(values, FP8, without=absent)
    if "fp8_override_linear_precision" in absent:
        return env
    overrides = getattr(values, "fp8_override_linear_precision", None) or (False, False, False)
    for name, value in zip(("FPROP", "DGRAD", "WGRAD"), overrides, strict=True):
        env[f"ACCELERATE_FP8_OVERRIDE_{name}"] = str(value)
    return env


def parallelism(values: Any) -> dict[str, str]:
    """The sizes of the axes, and the details of those that are there."""
    if not getattr(values, "use_parallelism_config", False):
        return {}
    absent = {
        name for name, axis in NEEDS_AXIS.items() if int(getattr(values, axis, None) or option(axis).default) == 1
    }
    env = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    return {**env, **_family(values, PARALLELISM, without=absent)}


def deepspeed_fields(values: Any) -> str:
    """Which settings of DeepSpeed the config file says: its own file may then not say them too."""
    names = list(getattr(getattr(values, "file", None), "deepspeed_config", None) or {})
    sources: Mapping[str, Any] = getattr(values, "of", {})
    if getattr(sources.get("mixed_precision"), "source", "") == "file":
        names.append("mixed_precision")
    return ",".join(names)


def _switches(values: Any) -> dict[str, str]:
    given = ("hang_timeout", "hang_timeout_action", "preemption", "resume")
    env = {variable(name): str(getattr(values, name)) for name in given if getattr(values, name, None) is not None}
    words = {"debug": "true", "enable_cpu_affinity": "1"}
    return env | {variable(name): word for name, word in words.items() if getattr(values, name, False)}


def _family(values: Any, family: Family, without: set[str] | None = None) -> dict[str, str]:
    env = {}
    for opt in family.options:
        value = getattr(values, opt.name, None)
        value = opt.default if value is None else value
        carrier = family.variable_of(opt)
        if carrier and value is not None and opt.name not in (without or ()):
            env[carrier] = opt.kind.write(value)
    return env
