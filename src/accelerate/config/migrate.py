"""What config files of earlier releases (0.11 and later) call differently, brought up to date."""

from __future__ import annotations

from typing import Any

from accelerate.constants import FSDP_SHARDING_STRATEGY

# Keys of settings that do nothing any more.
RETIRED = {
    "ipex_config": "PyTorch now does this itself",
    "use_mps_device": "Apple GPUs are detected automatically",
    "tp_config": "`parallelism_config` replaces it",
}
RETIRED_IN_SECTION = {
    ("mpirun_config", "mpirun_ccl"): "the communication library sets its own workers",
    ("fsdp_config", "fsdp_limit_all_gathers"): "it is always on",
}


def migrate(settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings under today's names, and a line for each change."""
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    changes: list[str] = []
    _mend_unquoted_no(settings)
    if "fp16" in settings:
        half = settings.pop("fp16")
        settings.setdefault("mixed_precision", "fp16" if half is True or str(half).lower() in ("yes", "true") else "no")
        changes.append(f"`fp16` is now `mixed_precision: {settings['mixed_precision']}`")
    _rename_distributed_type(settings, changes)
    if "dynamo_backend" in settings:
        backend = settings.pop("dynamo_backend")
        if str(backend).upper() != "NO":
            settings["dynamo_config"] = {"dynamo_backend": backend, **(settings.get("dynamo_config") or {})}
        changes.append("`dynamo_backend` is now part of `dynamo_config`")
    _rename_in_fsdp(settings.get("fsdp_config") or {}, changes)
    _retire(settings, changes)
    return settings, changes


def _mend_unquoted_no(settings: dict[str, Any]) -> None:
    """YAML takes `no` without quotes for false; where no truth value can stand, the word was meant."""
    for section, key, meant in (
        (settings, "distributed_type", "NO"),
        (settings, "mixed_precision", "no"),
        (settings, "dynamo_backend", "NO"),
        (settings.get("dynamo_config") or {}, "dynamo_backend", "NO"),
    ):
        if section.get(key) is False:
            section[key] = meant


def _rename_distributed_type(settings: dict[str, Any], changes: list[str]) -> None:
    for old, new in (("TPU", "XLA"), ("MPS", "NO")):
        if settings.get("distributed_type") == old:
            settings["distributed_type"] = new
            changes.append(f"the distributed type {old} is now called {new}")


def _rename_in_fsdp(fsdp: dict[str, Any], changes: list[str]) -> None:
    for old in ("fsdp_backward_prefetch_policy", "backward_prefetch_policy"):
        if old in fsdp:
            fsdp.setdefault("fsdp_backward_prefetch", fsdp.pop(old))
            changes.append(f"`{old}` is now `fsdp_backward_prefetch`")
    for key in ("fsdp_sharding_strategy", "sharding_strategy"):
        number = str(fsdp.get(key, ""))
        if number.isdigit() and 1 <= int(number) <= len(FSDP_SHARDING_STRATEGY):
            fsdp[key] = FSDP_SHARDING_STRATEGY[int(number) - 1]
            changes.append(f"the sharding strategy {number} is now called {fsdp[key]}")


def _retire(settings: dict[str, Any], changes: list[str]) -> None:
    for key, why in RETIRED.items():
        if key in settings:
            value = settings.pop(key)
            if key == "tp_config" and value:
                size = value.get("tp_size", 1)
                settings.setdefault("parallelism_config", {"parallelism_config_tp_size": size})
            changes.append(f"`{key}` has been removed: {why}")
    for (section, key), why in RETIRED_IN_SECTION.items():
        if key in (settings.get(section) or {}):
            del settings[section][key]
            changes.append(f"`{key}` of `{section}` has been removed: {why}")
