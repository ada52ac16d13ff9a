"""Imports inside the package point one way, and the first import costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import accelerate

ROOT = Path(accelerate.__file__).parent

# A part may import only what stands in an earlier row.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "constants", "text", "lazy", "per_rank", "bundle"),
    ("doors",),
    ("torch_internals",),
    ("versions",),
    ("config",),
    ("available", "parallelism_config"),
    ("environments",),
    ("diagnosis",),
    ("comm",),
    ("devices",),
    ("state", "machine"),
    ("launch",),
    ("launch_commands",),
    ("logging", "memory", "random", "tqdm", "compilation"),
    ("unwrap", "memory_utils"),
    ("modules", "io"),
    ("parallel", "runs"),
    ("precision", "data_loader", "tracking"),
    ("step_timer",),
    ("checkpoint",),
    ("offload",),
    ("hooks",),
    ("big_modeling",),
    ("estimate",),
    ("quantization",),
    ("optimizer",),
    ("scheduler",),
    ("engines",),
    ("strategies",),
    ("accumulation",),
    ("checkpointing", "accelerator"),
    ("inference", "local_sgd", "launchers", "memory_utils"),
    ("commands",),
    ("__main__",),
    ("utils",),
    ("test_utils",),
)
LEVEL = {part: number for number, row in enumerate(LEVELS) for part in row}


# Imports inside a function that point up, each with its reason.
UPWARD_IN_FUNCTIONS = {
    ("config", "available"): "a public function of the config's module asks what hardware there is",
}


# What a script with one device and no loader does not need, and so does not wait for.
NOT_AT_THE_START = (
    "accelerate.accelerator.loaders",
    "accelerate.accelerator.uneven",
    "accelerate.accelerator.whole_run",
    "accelerate.big_modeling",
    "accelerate.checkpoint",
    "accelerate.comm.checked",
    "accelerate.config.deepspeed",
    "accelerate.config.fsdp",
    "accelerate.config.parallel",
    "accelerate.data_loader",
    "accelerate.devices.cuda_start",
    "accelerate.diagnosis.place",
    "accelerate.diagnosis.watch",
    "accelerate.launch",
    "accelerate.memory",
    "accelerate.parallelism_config",
    "accelerate.state.lost",
    "accelerate.step_timer",
    "accelerate.strategies.ddp",
    "accelerate.strategies.fsdp1",
    "accelerate.strategies.fsdp2",
    "accelerate.tracking",
    "accelerate.utils",
    "numpy.random",
    "sysconfig",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "yaml",
)
MOST_AT_THE_START = 80  # of our own


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each part of the package that a file imports, and whether it does so when it is loaded."""
    tree = ast.parse(path.read_text())
    inside_functions = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "accelerate" and len(parts) > 1:
                yield parts[1], id(node) not in inside_functions


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def test_every_part_has_its_place() -> None:
    assert {part_of(path) for path in FILES} <= set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    mine = part_of(path)
    for other, at_load in imports(path):
        if other == mine or other.startswith("__"):
            continue
        assert other in LEVEL, f"{path} imports accelerate.{other}, which has no place"
        if at_load or (mine, other) not in UPWARD_IN_FUNCTIONS:
            assert LEVEL[other] < LEVEL[mine], f"{mine} may not import {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_from_utils(path: Path) -> None:
    if part_of(path) not in ("utils", "test_utils"):
        assert "utils" not in [other for other, _ in imports(path)]


@pytest.mark.parametrize(
    "module",
    [
        "accelerate",
        "accelerate.config.enums",
        "accelerate.config.handlers",
        "accelerate.config.deepspeed",
        "accelerate.config.fp8",
        "accelerate.config.megatron",
        "accelerate.environments",
        "accelerate.launch.run",
        "accelerate.launch.engines",
        "accelerate.commands.launch",
        "accelerate.commands.config",
        "accelerate.commands.runs",
        "accelerate.runs.serve",
        "accelerate.runs.terminal",
    ],
)
def test_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'yaml', 'psutil'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_an_accelerator_brings_along_what_it_needs_alone() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from accelerate import Accelerator; Accelerator(cpu=True)\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = result.stdout.split()
    needless = [
        name for name in loaded if name in NOT_AT_THE_START or name.startswith(tuple(f"{n}." for n in NOT_AT_THE_START))
    ]
    assert needless == []
    assert len([name for name in loaded if name.partition(".")[0] == "accelerate"]) <= MOST_AT_THE_START
