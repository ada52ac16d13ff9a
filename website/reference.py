"""The reference of Python names, from stubs and sources that are not imported: one page for each public module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import griffe

SOURCE = Path(__file__).resolve().parents[1] / "src"
# Public modules in the order of the menu. A name that several of them have is described at the first.
MODULES: dict[str, tuple[str, ...]] = {
    "Training": (
        "accelerate.accelerator",
        "accelerate.optimizer",
        "accelerate.scheduler",
        "accelerate.local_sgd",
    ),
    "Data": ("accelerate.data_loader",),
    "Settings": ("accelerate.utils.dataclasses", "accelerate.parallelism_config"),
    "Processes": (
        "accelerate.state",
        "accelerate.launchers",
        "accelerate.utils.operations",
        "accelerate.utils.random",
        "accelerate.utils.launch",
        "accelerate.utils.environment",
    ),
    "Checkpoints": ("accelerate.checkpointing", "accelerate.utils.fsdp_utils"),
    "Big models": (
        "accelerate.big_modeling",
        "accelerate.utils.modeling",
        "accelerate.utils.offload",
        "accelerate.hooks",
        "accelerate.inference",
        "accelerate.utils.bnb",
    ),
    "Reporting": ("accelerate.tracking", "accelerate.logging", "accelerate.utils.tqdm"),
    "Engines": (
        "accelerate.utils.deepspeed",
        "accelerate.utils.megatron_lm",
        "accelerate.utils.ao",
        "accelerate.utils.transformer_engine",
        "accelerate.utils.torch_xla",
    ),
    "The rest": (
        "accelerate.errors",
        "accelerate.utils.other",
        "accelerate.utils.memory",
        "accelerate.utils.imports",
        "accelerate.utils.versions",
        "accelerate.utils.constants",
    ),
    "Commands, called from Python": (
        "accelerate.commands.launch",
        "accelerate.commands.config",
        "accelerate.commands.config.config",
        "accelerate.commands.config.config_args",
        "accelerate.commands.config.cluster",
        "accelerate.commands.config.config_utils",
        "accelerate.commands.config.default",
        "accelerate.commands.config.update",
        "accelerate.commands.env",
        "accelerate.commands.estimate",
        "accelerate.commands.merge",
        "accelerate.commands.test",
        "accelerate.commands.to_fsdp2",
        "accelerate.commands.tpu",
        "accelerate.commands.accelerate_cli",
        "accelerate.commands.utils",
    ),
    "Tests of your own": (
        "accelerate.test_utils.testing",
        "accelerate.test_utils.training",
        "accelerate.test_utils.examples",
        "accelerate.test_utils",
    ),
}
# Where most scripts import from: these have no page, and their names lead to the pages of the others.
SHORT = ("accelerate", "accelerate.utils")
# Other modules have its names too, and it alone is about them.
CONSTANTS = "accelerate.utils.constants"


def modules() -> Iterator[str]:
    """The public modules, in the order of the menu."""
    for group in MODULES.values():
        yield from group


@dataclass(frozen=True)
class Name:
    """A public name: where it is imported from, where it is described, and in which words."""

    name: str
    module: str
    target: str  # its definition
    summary: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@cache
def package() -> griffe.Module:
    loaded = griffe.load("accelerate", search_paths=[str(SOURCE)])
    assert isinstance(loaded, griffe.Module)
    return loaded


def stub_names(module: str) -> dict[str, str]:
    """The names that a stub imports under a name, with what they mean; those of a star are of the stub beside it."""
    place = SOURCE.joinpath(*module.split("."))
    stub = next((file for file in (place / "__init__.pyi", place.with_suffix(".pyi")) if file.exists()), None)
    if stub is None:
        return {}
    names: dict[str, str] = {}
    for node in ast.parse(stub.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.module == module:
            continue
        for alias in node.names:
            if alias.name == "*":
                names.update(stub_names(node.module))
            elif alias.asname is not None and not alias.asname.startswith("_"):
                names[alias.asname] = f"{node.module}.{alias.name}"
    return names


def public_names(module: str) -> dict[str, str]:
    """What a module offers, each name with the path that it is defined at."""
    names = stub_names(module)
    found = _object(module)
    assert isinstance(found, griffe.Module), module
    for name in () if names else found.exports or _defined(found):
        names[str(name)] = f"{module}.{name}"
    return {name: _object(path).canonical_path for name, path in sorted(names.items(), key=_as_read)}


def _defined(module: griffe.Module) -> list[str]:
    return [name for name, member in module.members.items() if not member.is_alias and not name.startswith("_")]


def _as_read(item: tuple[str, str]) -> tuple[int, str]:
    """Classes first, then functions, then constants: what a reader most likely looks for comes first."""
    name = item[0]
    return (2 if name.isupper() else 0 if name[0].isupper() else 1), name.lower()


def _object(path: str) -> griffe.Object:
    found = package() if path == "accelerate" else package()[path.removeprefix("accelerate.")]
    return found.final_target if isinstance(found, griffe.Alias) else found


@cache
def described() -> dict[str, Name]:
    """Every definition that has a public name, with the page it is described on."""
    found: dict[str, Name] = {}
    for module in (CONSTANTS, *modules()):
        for name, target in public_names(module).items():
            said = _object(target).docstring
            summary = said.value.partition("\n\n")[0].replace("\n", " ") if said else ""
            found.setdefault(target, Name(name, module, target, summary))
    return found


def menu() -> list[Any]:
    """The part of the menu with these pages."""
    groups = [{title: [f"reference/{module}.md" for module in group]} for title, group in MODULES.items()]
    return [{"Python": ["reference/index.md", *groups]}]


def pages() -> dict[str, str]:
    """The pages of the reference, by their place; the first is the index of all names."""
    made = {"reference/index.md": _index()}
    for module in modules():
        made[f"reference/{module}.md"] = _page(module)
    return made


def _page(module: str) -> str:
    said = _object(module).docstring
    here = [name for name in described().values() if name.module == module]
    elsewhere = [
        described()[target] for target in public_names(module).values() if described()[target].module != module
    ]
    lines = [f"# {module}", "", said.value if said else "", ""]
    if here:
        lines += ["| name | import from | |", "|---|---|---|"]
        lines += [f"| [`{name.name}`][{name.path}] | `{_shortest(name)}` | {_cell(name.summary)} |" for name in here]
        lines += ["", ""]
    if elsewhere:
        there = ", ".join(f"[`{name.name}`][{name.path}]" for name in elsewhere)
        lines += [f"Described elsewhere: {there}.", ""]
    for name in here:
        lines += [f"::: {name.path}", ""]
    return "\n".join(lines)


def _shortest(name: Name) -> str:
    """The shortest module that a name can be imported from."""
    return next((module for module in SHORT if name.target in short_names(module).values()), name.module)


@cache
def short_names(module: str) -> dict[str, str]:
    return public_names(module)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _index() -> str:
    lines = [
        "# Python reference",
        "",
        "Every public name, in the words of the sources. The names of the first table are imported from `accelerate`,",
        "those of the second from `accelerate.utils`. The menu lists the modules.",
        "",
    ]
    for module in SHORT:
        lines += [f"## {module}", "", "| name | |", "|---|---|"]
        for name, target in short_names(module).items():
            at = described().get(target)
            if at is not None:
                lines.append(f"| [`{name}`][{at.path}] | {_cell(at.summary)} |")
        lines.append("")
    lines += ["## Modules", ""]
    for title, group in MODULES.items():
        lines += [f"- **{title}**: " + ", ".join(f"[{module}]({module}.md)" for module in group)]
    return "\n".join([*lines, ""])
