"""Finds names of torch in the syntax trees of the package, and hides them."""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate

ROOT = Path(accelerate.__file__).parent
INTERNALS = ROOT / "torch_internals"
FILES = sorted(ROOT.rglob("*.py"))
OUTSIDE = [path for path in FILES if INTERNALS not in path.parents]

_ASKS = ("getattr", "hasattr", "setattr", "delattr")
_ASKS_BY_METHOD = ("attrgetter", "methodcaller", "__getattribute__", "__getattr__", "__setattr__", "__delattr__")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name.isidentifier()


def _definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node


def _is_own(node: ast.expr) -> bool:
    """Whether an attribute is one of the object whose class is being written."""
    of_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return of_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def defined_in(tree: ast.AST) -> set[str]:
    """Private names that a file makes up itself: functions, classes, variables, and attributes of its own objects."""
    found = {node.name for node in _definitions(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return {name for name in found if is_private(name)}


def imported(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """What a file imports, in full, and under which name it knows it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", alias.asname or alias.name


def private_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that a file imports from torch, and private modules on the way to others."""
    for line, name, _ in imported(tree):
        parts = name.split(".")
        if parts[0] == "torch":
            yield from ((line, part) for part in parts if is_private(part))


def private_uses(tree: ast.AST, *, of_self: bool) -> Iterator[tuple[int, str]]:
    """Private attributes of objects, written out or asked for by name, and private arguments of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and (of_self or not _is_own(node.value)):
            yield node.lineno, node.attr
        else:
            yield from ((node.lineno, name) for name in _asked_for(node) if is_private(name))


def _asked_for(node: ast.AST) -> list[str]:
    """The names, written as texts, by which attributes of an object are looked up."""
    asked: list[ast.expr] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKS:
        asked = node.args[1:2]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_ASKS_BY_METHOD):
        asked = node.args
    elif isinstance(node, ast.Subscript) and re.search(r"(^vars\(.*\)|\.__dict__)$", ast.unparse(node.value)):
        asked = [node.slice]
    return [str(each.value) for each in asked if isinstance(each, ast.Constant)]


def private_arguments(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None and is_private(node.arg):
            yield node.value.lineno, node.arg


def private_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names in texts: keys of `__dict__`, and modules in `sys.modules`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from ((node.lineno, part) for part in node.value.split(".") if is_private(part))


def overridden(tree: ast.AST) -> Iterator[str]:
    """Private methods of classes that nobody in the file calls: torch does."""
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in _definitions(tree):
        if isinstance(node, ast.ClassDef):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef) and is_private(each.name)}
            yield from (name for name in methods if f"self.{name}" not in called)


def hidden_names() -> list[str]:
    """All private names that `torch_internals` asks torch for."""
    names: set[str] = set()
    for path in INTERNALS.glob("*.py"):
        tree = tree_of(path)
        uses = (private_imports(tree), private_uses(tree, of_self=False), private_arguments(tree), private_texts(tree))
        names |= {name for found in uses for _, name in found} | set(overridden(tree))
    return sorted(names)


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What the names of a file stand for in full: imports, and variables that were set to one of those."""
    known = {"torch": "torch"} | {as_name: name for _, name, as_name in imported(tree)}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, (ast.Name, ast.Attribute)):
            full = _full(value, known)
            known |= {
                target.id: full for target in targets if isinstance(target, ast.Name) and full.startswith("torch")
            }
    return known


def _full(node: ast.expr, known: dict[str, str]) -> str:
    """The full path of `c.Stream`, where `c` is `torch.cuda`."""
    start, dot, rest = ast.unparse(node).partition(".")
    return known.get(start, start) + dot + rest


def attributes_of(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """The names that a file uses from a module of torch: `dist.all_reduce`, `torch.cuda.Stream`; not modules inside.

    The module itself is one of them where it is handed on as a value, or asked for by its name.
    """
    known = _aliases(tree)
    used = [(line, name) for line, name, _ in imported(tree)]
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            full = _full(node, known)
            used.append((node.lineno, full if id(node) in inner or full != module else f"{module}.itself"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKS:
            owner, asked = _full(node.args[0], known), node.args[1]
            name = str(asked.value) if isinstance(asked, ast.Constant) else "a_variable"
            used.append((node.lineno, f"{owner}.{name}" if f"{owner}.{name}" != module else f"{module}.itself"))
        elif isinstance(node, ast.Call) and ast.unparse(node).endswith(f"import_module({module!r})"):
            used.append((node.lineno, f"{module}.itself"))
    for line, name in used:
        owner, _, attribute = name.rpartition(".")
        owner = owner.removesuffix(".distributed_c10d")  # where the functions of torch.distributed are written
        if owner == module and importlib.util.find_spec(f"{owner}.{attribute}") is None:
            yield line, attribute


def by_variable(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where a name that is only known when the program runs is looked up in torch or a module of it."""
    known = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKS:
            owner = _full(node.args[0], known)
            if not isinstance(node.args[1], ast.Constant) and owner.split(".")[0] == "torch":
                yield node.lineno, owner


def near(path: Path) -> set[Path]:
    """A file of the package, those it imports, and those that they import: whose objects it may hold."""
    direct = _imports(path)
    return {path, *direct, *(found for other in direct for found in _imports(other))}


@functools.cache
def _imports(path: Path) -> frozenset[Path]:
    found = set()
    for _, name, _ in imported(tree_of(path)):
        parts = name.split(".")
        for end in (len(parts), len(parts) - 1):  # the last part may be a name in the module
            base = ROOT.joinpath(*parts[1:end])
            if parts[0] == "accelerate":
                found |= {file for file in (base.with_suffix(".py"), base / "__init__.py") if file.exists()}
    return frozenset(found)


# --- hiding -----------------------------------------------------------------------------------------------------


class _Hidden(ast.NodeTransformer):
    """Writes another name wherever a private one of torch is used, so that torch seems not to have it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gone = f"{name}_has_vanished"

    def _path(self, path: str) -> str:
        return ".".join(self.gone if part == self.name else part for part in path.split("."))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == self.name and not _is_own(node.value):
            node.attr = self.gone
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and " " not in node.value:
            node.value = self._path(node.value)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        node.module = self._path(node.module or "")
        for alias in node.names:
            if alias.name == self.name:
                alias.asname, alias.name = alias.asname or alias.name, self.gone
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == self.name:
            node.arg = self.gone
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name == self.name:
            node.name = self.gone
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a file with a name hidden, and leaves nothing of that behind."""

    name_to_hide = ""

    def source_to_code(self, data: Any, path: Any, *_: Any, **__: Any) -> Any:
        tree = _Hidden(self.name_to_hide).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class Hiding(importlib.abc.MetaPathFinder):
    """Loads `torch_internals` as if torch had no longer one of its private names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("accelerate.torch_internals."):
            return None
        file = INTERNALS / f"{fullname.rpartition('.')[2]}.py"
        loader = _Loader(fullname, str(file))
        loader.name_to_hide = self.name
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)

    def install(self) -> None:
        assert not any(name.startswith("accelerate.torch_internals.") for name in sys.modules)
        sys.meta_path.insert(0, self)


def without(name: str, file: str) -> Any:
    """A file of `torch_internals` as it is where torch has no longer this name, beside the one that all others use."""
    spec: Any = Hiding(name).find_spec(f"accelerate.torch_internals.{file}", None)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
