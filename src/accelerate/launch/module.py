"""Whether there is a module to run: looked up by its files, so that no code of it, nor of its packages, runs here."""

from __future__ import annotations

import os
import pkgutil
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from accelerate.text import did_you_mean

# What the first file of a package has in it if its modules may come from elsewhere.
_ELSEWHERE = ("__path__", "meta_path", "path_hooks", "sys.modules", "declare_namespace")


def why_not(name: str) -> str | None:
    """One sentence about a module that certainly cannot be run; None for all others."""
    is_path = "/" in name or os.sep in name
    problem = None if is_path else _problem(name)
    if is_path or (problem is not None and name.endswith(".py")):
        dotted = os.path.normpath(name).removesuffix(".py").replace(os.sep, ".")
        write = "" if dotted.startswith(".") else f"write `-m {dotted}`, or "
        return f"`-m` takes the name of a module, with dots, and {name} is that of a file: {write}leave out `-m`."
    return problem


def _problem(name: str) -> str | None:
    folders = [os.getcwd(), *sys.path]
    before = ""
    for part in name.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            if _is_found_otherwise(before + part):
                return None
            near = did_you_mean(before + part, [before + found.name for found in pkgutil.iter_modules(folders)])
            where = f"package {before[:-1]}" if before else f"folder {os.getcwd()}, nor on Python's path"
            return f"There is no module {before}{part}{near} in the {where}: correct its name."
        if not _is_plain(spec):
            return None
        folders = list(spec.submodule_search_locations or ())
        before += f"{part}."
    if folders and PathFinder.find_spec("__main__", folders) is None:
        return f"{name} is a package without a `__main__`: name one of its modules, as in `-m {name}.train`."
    return None


def _is_plain(spec: ModuleSpec) -> bool:
    """Whether the modules of a package are where its files are. A folder without an `__init__.py` has no origin."""
    if spec.origin is None:
        return True
    try:
        text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return spec.origin.endswith(".py") and not any(word in text for word in _ELSEWHERE)


def _is_found_otherwise(name: str) -> bool:
    """Whether Python knows a module that is not on its path, as those of packages installed to be edited."""
    try:
        return any(finder.find_spec(name, None) is not None for finder in sys.meta_path if finder is not PathFinder)
    except Exception:  # of a finder that somebody has installed: it is not certain
        return True
