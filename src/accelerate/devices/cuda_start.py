"""Which line started CUDA in this process. A process in which it runs cannot be forked: its children get no GPU."""

from __future__ import annotations

import linecache
import re
import site
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import torch

from accelerate.torch_internals.cuda import when_started

_stack: list[tuple[str, int]] | None = None
_remembering = False


def remember() -> None:
    """Remember the line that starts CUDA, if it has not started yet.

    torch starts CUDA at its first use, and then makes the calls that were deferred until that moment. Ours is one of
    them, inside the very call that started it.
    """
    global _remembering
    if not _remembering and not has_started():
        _remembering = True
        when_started(_note)


def has_started() -> bool:
    return torch.cuda.is_initialized()


def _note() -> None:
    global _stack
    if _stack is None:
        _stack = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()]


def place() -> str | None:
    """The line of the user's own code that started CUDA, as text; None if it started before anybody looked."""
    if _stack is None:
        return None
    own = [frame for frame in _stack if not _is_library(frame[0])]
    filename, number = own[-1] if own else _stack[-1]
    return f"{_file(filename)}, line {number}: `{linecache.getline(filename, number).strip()}`"


def suspects() -> list[str]:
    """Lines in the notebook's cells that mention CUDA: the best guess if `place()` is not known."""
    shell = _shell()
    cells = shell.user_ns.get("In", []) if shell is not None else []
    return [
        f"In[{number}], line {row}: `{line.strip()}`"
        for number, cell in enumerate(cells[:-1])  # the last is the one that is running
        for row, line in enumerate(cell.splitlines(), 1)
        if re.search(r"\bcuda\b", line) and "is_available" not in line
    ]


def _is_library(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return True
    folders = {*sysconfig.get_paths().values(), *site.getsitepackages(), str(Path(__file__).parents[1])}
    # sysconfig's `scripts` and `data` are folders of programs and of the whole environment: users' code may be there
    folders -= {sysconfig.get_path("scripts"), sysconfig.get_path("data")}
    return any(filename.startswith(folder.rstrip("/") + "/") for folder in folders)


def _file(filename: str) -> str:
    """The number of a cell, if IPython made up the file name for it."""
    compiler: Any = getattr(_shell(), "compile", None)
    name = compiler.format_code_name(filename) if hasattr(compiler, "format_code_name") else None
    return str(name[1]) if name else filename


def _shell() -> Any:
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None
