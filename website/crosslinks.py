"""Names in the prose of the guides lead to their place in the reference, the first time that a page mentions them."""

from __future__ import annotations

import re
from functools import cache

import griffe

from website import reference

CODE = re.compile(r"(?<!\[)`(accelerator\.)?([A-Za-z]\w*)(\([^`]*\))?`(?!\])")
FENCE = re.compile(r"^ *(```+)")
# Methods that a guide calls by their bare name. Others do so only if they have a name that is no plain word.
BARE = {"accumulate", "gather", "prepare", "reduce"}


@cache
def targets() -> dict[str, str]:
    """What names lead to: methods of the Accelerator, what is imported from the short modules, and every class."""
    kind = reference.package()["accelerator.Accelerator"]
    assert isinstance(kind, griffe.Class)
    methods = {
        name: f"accelerate.accelerator.Accelerator.{name}"
        for name, member in kind.all_members.items()
        if not name.startswith("_") and member.docstring is not None
    }
    found = {f"accelerator.{name}": path for name, path in methods.items()}
    for module in reference.SHORT:
        for name, target in reference.short_names(module).items():
            if not name.isupper() and ("_" in name or name[0].isupper()):
                found[name] = reference.described()[target].path
    found.update({name: path for name, path in methods.items() if "_" in name or name in BARE})
    for described in reference.described().values():
        if described.name[0].isupper() and not described.name.isupper():
            found.setdefault(described.name, described.path)
    return found


def linked(markdown: str) -> str:
    """The Markdown of a guide, with links at names that stand in its text; code and headings stay as they are."""
    seen: set[str] = set()
    lines = []
    inside = ""  # the fence of the block that a line is in
    for line in markdown.split("\n"):
        fence = FENCE.match(line)
        if fence and not inside:
            inside = fence[1]
        elif fence and fence[1] == inside:
            inside = ""
        elif not inside and not line.startswith("#"):
            line = CODE.sub(lambda found: _link(found, seen), line)
        lines.append(line)
    return "\n".join(lines)


def _link(found: re.Match[str], seen: set[str]) -> str:
    prefix, name, _ = found.groups()
    target = targets().get(f"{prefix or ''}{name}")
    if target is None or target in seen:
        return found[0]
    seen.add(target)
    return f"[{found[0]}][{target}]"
