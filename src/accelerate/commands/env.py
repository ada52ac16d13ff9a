"""`accelerate env`: versions, hardware, config, and what a launch would make of them and why."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from accelerate import __version__, environments
from accelerate.commands.utils import command_parser, run_command
from accelerate.config import file as config_file
from accelerate.launch import machine

# Packages whose version often matters when something does not work.
PACKAGES = ("torch", "numpy", "safetensors", "transformers", "datasets", "peft", "trl", "diffusers", "deepspeed",
            "bitsandbytes", "torchao", "torch_xla", "megatron-core", "transformer-engine")  # fmt: skip
# Variables that change what a run does, besides those of accelerate itself.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "RANK",
             "WORLD_SIZE", "LOCAL_RANK", "HF_HOME", "XDG_CACHE_HOME", "PYTORCH_CUDA_ALLOC_CONF")  # fmt: skip
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "NCCL_", "GLOO_", "SLURM_JOB", "OMPI_COMM", "TORCH_", "DS_")


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate env`.

    Args:
        subparsers: the subcommands of a parser, to which this one is added. By default it is a parser by itself.
    """
    description = "Show versions, hardware, config and what was detected, to paste into a bug report."
    parser = command_parser("env", subparsers, description)
    parser.add_argument("--config_file", default=None, help="the config file; default: the file that `launch` reads")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=env_command)
    return parser


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print the versions, hardware and settings of this machine.

    Args:
        args: the arguments, as the parser of `accelerate env` returns them.

    Returns:
        What was printed, by title.
    """
    facts = collect(args.config_file)
    if getattr(args, "json", False):
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_as_text(facts)))
    return facts


def collect(config: str | None = None) -> dict[str, Any]:
    """Return all facts about this machine, by title, without importing torch.

    Args:
        config: the path of the config file. By default that of the default config.
    """
    return {
        "Versions": _versions(),
        "System": _system(),
        "GPUs": _gpus(),
        "Detected": _detected(),
        "Config": _config(config),
        "Environment": _environment(),
    }


def _versions() -> dict[str, str]:
    found = {"accelerate": __version__, "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _system() -> dict[str, str]:
    facts = {
        "Platform": platform.platform(),
        "Python": sys.executable,
        "accelerate command": shutil.which("accelerate") or "not on the PATH",
        "Cores": f"{machine.cores()} that this process may use, of {os.cpu_count()}",
    }
    import psutil

    memory = psutil.virtual_memory()
    facts["Memory"] = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    if os.path.isdir("/dev/shm"):
        facts["Memory"] += f"; /dev/shm {shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free"
    facts["Disk"] = f"{shutil.disk_usage('.').free / 1e9:.0f} GB free in the working folder"
    return facts


def _gpus() -> list[dict[str, str]]:
    """What the drivers say, by their own programs."""
    query = "name,memory.total,memory.used,driver_version,compute_cap,pci.bus_id"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    rows = _output(command)
    keys = ("name", "memory", "used", "driver", "compute capability", "bus")
    return [dict(zip(keys, map(str.strip, row.split(",")), strict=False)) for row in rows]


def _output(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _detected() -> dict[str, str]:
    found = machine.accelerators()
    world = environments.detect(os.environ)
    precision, why = machine.best_precision(found)
    fp8, why_fp8 = machine.fp8(found)
    what = f"{found.count} x {found.kind}" if found.count else "the CPU"
    return {
        "Devices": f"{what} ({found.reason})",
        "Started by": f"{world.started_by} ({world.reason})",
        "Precision": f"{precision} ({why})",
        "fp8": f"{fp8} ({why_fp8})",
    }


def _config(path: str | None) -> dict[str, Any]:
    place = Path(path).expanduser() if path is not None else config_file.default_path()
    if path is None and not place.is_file():
        return {"file": f"{place} (there is none: flags, detected values and defaults apply)"}
    try:
        return {"file": str(place), **config_file.load_config_from_file(place).to_dict()}
    except (ValueError, TypeError, OSError) as error:
        return {"file": str(place), "error": str(error)}


def _environment() -> dict[str, str]:
    secret = ("TOKEN", "KEY", "SECRET", "PASSWORD")
    return {
        name: "(set)" if any(word in name for word in secret) else value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith(PREFIXES)
    }


def _as_text(facts: dict[str, Any]) -> list[str]:
    lines = []
    for title, section in facts.items():
        lines.append(title)
        if isinstance(section, list):
            lines += [
                f"  {number}: {', '.join(f'{k} {v}' for k, v in each.items())}" for number, each in enumerate(section)
            ]
        else:
            lines += _indented(section, "  ")
        if not section:
            lines.append("  none")
    return lines


def _indented(section: dict[str, Any], margin: str) -> list[str]:
    lines = []
    for key, value in section.items():
        if isinstance(value, dict):
            lines += [f"{margin}{key}:", *_indented(value, margin + "  ")]
        else:
            lines.append(f"{margin}{key}: {value}")
    return lines


def main() -> None:
    """Run `python -m accelerate.commands.env`."""
    run_command(env_command_parser())


if __name__ == "__main__":
    main()
