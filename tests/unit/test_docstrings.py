"""The docstrings of public names are in the form that tools render, and name the parameters there are."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
# The docstrings of these modules are not in that form yet. Nothing is added here, and what is done is removed.
NOT_YET = ("accelerate.config.megatron", "accelerate.engines.megatron")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclasses.dataclass(frozen=True)
class Place:
    """Where something is defined."""

    module: str
    path: str  # its name there, after that of its class
    node: Definition

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


@cache
def tree(module: str, suffix: str = ".py") -> ast.Module | None:
    place = SOURCE.joinpath(*module.split("."))
    files = (place / f"__init__{suffix}", place.with_suffix(suffix))
    file = next((file for file in files if file.exists()), None)
    return None if file is None else ast.parse(file.read_text(encoding="utf-8"))


def public_modules() -> list[str]:
    """The modules that the website has a page for, and the two that most scripts import from."""
    for node in ast.parse((ROOT / "website" / "reference.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MODULES" and node.value is not None:
            groups: dict[str, tuple[str, ...]] = ast.literal_eval(node.value)
            return ["accelerate", "accelerate.utils", *(module for group in groups.values() for module in group)]
    raise AssertionError("website/reference.py has no MODULES")


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also under an `if` or a `try`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from statements([*node.body, *node.orelse])


@cache
def imported(module: str, suffix: str = ".py") -> dict[str, tuple[str, str]]:
    """The names that a module imports from others of the package; those of a star are of the stub beside it."""
    found: dict[str, tuple[str, str]] = {}
    parsed = tree(module, suffix)
    for node in statements(parsed.body) if parsed else ():
        if not isinstance(node, ast.ImportFrom) or node.module is None or not node.module.startswith("accelerate"):
            continue
        for alias in node.names:
            if alias.name == "*":
                found.update(imported(node.module, suffix))
            else:
                found[alias.asname or alias.name] = node.module, alias.name
    return found


@cache
def defined(module: str) -> dict[str, Definition]:
    parsed = tree(module)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in statements(parsed.body) if isinstance(node, kinds)} if parsed else {}


def find(module: str, name: str) -> Place | None:
    """The definition behind a name, or None for a constant, a module or what other packages have."""
    if name in defined(module):
        return Place(module, name, defined(module)[name])
    there = imported(module).get(name) or imported(module, ".pyi").get(name)
    return None if there is None or there == (module, name) else find(*there)


def exported(module: str) -> Iterator[str]:
    """What a module offers: the names in its stub, in `__all__`, or all that it defines."""
    if tree(module, ".pyi") is not None:
        yield from imported(module, ".pyi")
        return
    parsed = tree(module)
    assert parsed is not None, module
    for node in parsed.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)
            return
    yield from defined(module)


def lineage(place: Place) -> list[Place]:
    """A class and those of the package that it derives from, in the order in which Python looks for a method."""
    found = [place]
    for base in place.node.bases if isinstance(place.node, ast.ClassDef) else ():
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and (there := find(place.module, name.id)) is not None:
            found += lineage(there)
    return list(dict.fromkeys(reversed(found)))[::-1]  # what several derive from comes after all of them


def methods(place: Place) -> Iterator[Place]:
    """The public methods of a class, and those of its bases."""
    for each in lineage(place):
        for node in each.node.body if isinstance(each.node, ast.ClassDef) else ():
            if isinstance(node, Function) and not node.name.startswith("_") and not is_hint(node):
                yield Place(each.module, f"{each.path}.{node.name}", node)


def is_hint(function: Function) -> bool:
    """Whether it is an overload, which has no docstring, or a setter, whose property has it."""
    names = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(name == "overload" or name.endswith(".setter") for name in names)


@cache
def public() -> list[Place]:
    """All public definitions, each once."""
    found: dict[str, Place] = {}
    for module in public_modules():
        for name in exported(module):
            place = None if name.startswith("_") else find(module, name)
            if place is not None:
                found.update({str(each): each for each in (place, *methods(place))})
    return list(found.values())


def parameters(place: Place) -> list[str]:
    """The parameters of a function, or those that make an object of a class."""
    if isinstance(place.node, Function):
        return arguments(place.node)
    for each in lineage(place):
        for node in each.node.body:
            if isinstance(node, Function) and node.name == "__init__":
                return arguments(node)
        if any(ast.unparse(decorator).startswith("dataclass") for decorator in each.node.decorator_list):
            return fields(each.node)
    return []


def arguments(function: Function) -> list[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [each.arg for each in every if each is not None and each.arg not in ("self", "cls")]


def fields(node: Definition) -> list[str]:
    """The fields of a dataclass, without those that nobody passes."""
    inner = re.compile(r"init=False|ClassVar")
    found = [each for each in node.body if isinstance(each, ast.AnnAssign) and not inner.search(ast.unparse(each))]
    return [ast.unparse(each.target) for each in found]


def documented(docstring: str) -> list[str] | None:
    """The names in the section `Args:` of a docstring, or None if there is no such section."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return None
    return [name.lstrip("*") for name in re.findall(r"^    (\*{0,2}\w+): ", section[1], re.MULTILINE)]


def docstring(place: Place) -> str:
    return ast.get_docstring(place.node) or ""


def is_override(place: Place) -> bool:
    """Whether a method can have the docstring of a method that it overrides."""
    owner = defined(place.module).get(place.path.rpartition(".")[0])
    return isinstance(owner, ast.ClassDef) and bool(owner.bases)


def test_the_public_names_are_found() -> None:
    names = {str(place) for place in public()}
    assert {
        "accelerate.accelerator.Accelerator",
        "accelerate.accelerator.step.Stepping.backward",
        "accelerate.big_modeling.dispatch.dispatch_model",
        "accelerate.commands.launch.launch_command",
        "accelerate.tracking.base.GeneralTracker.log",
    } <= names


def test_public_names_have_a_docstring() -> None:
    assert [str(place) for place in public() if not docstring(place) and not is_override(place)] == []


def test_the_first_line_stands_by_itself() -> None:
    wrong = []
    for place in public():
        first, *others = docstring(place).split("\n")
        if first and (not first.endswith(".") or (others and others[0])) and not str(place).startswith(NOT_YET):
            wrong.append(f"{place}: {first}")
    assert wrong == []


def test_the_arguments_are_those_of_the_signature() -> None:
    wrong = []
    for place in public():
        names = documented(docstring(place))
        if names is not None and sorted(names) != sorted(parameters(place)) and not str(place).startswith(NOT_YET):
            wrong.append(f"{place} documents {names}, and has {parameters(place)}")
    assert wrong == []


def test_arguments_are_documented() -> None:
    lacking = []
    for place in public():
        inherits = not docstring(place) and is_override(place)
        if parameters(place) and documented(docstring(place)) is None and not inherits:
            lacking.append(str(place))
    assert [name for name in lacking if not name.startswith(NOT_YET)] == []
    done = [module for module in NOT_YET if not any(name.startswith(module) for name in lacking)]
    assert done == [], "every public name there has its arguments now: take these off the list"
