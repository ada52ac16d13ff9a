"""Code blocks of a Markdown file: what is in them and how they are marked (see CONTRIBUTING.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^`]*)$")
RUNNABLE = {"python": "python", "py": "python", "bash": "bash", "shell": "bash", "sh": "bash"}


@dataclass(frozen=True)
class Block:
    """One block of code. `world` is 0 for a plain process, otherwise the number of ranks."""

    file: str
    line: int  # of its first line of code
    language: str
    source: str
    example: bool = False
    continues: bool = False
    world: int = 0

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_blocks(path: Path, name: str) -> list[Block]:
    """Every Python and shell block of the file, in order; a marker nobody knows is an error."""
    blocks: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        indent, first = len(opening["indent"]), number
        while number < len(lines) and lines[number].strip() != opening["fence"]:
            number += 1
        if number == len(lines):
            raise ValueError(f"{name}:{first}: this code block is never closed")
        source = "\n".join(line[indent:] if line[:indent].isspace() else line for line in lines[first:number])
        number += 1
        language, *markers = opening["info"].split() or [""]
        if language in RUNNABLE:
            previous = blocks[-1] if blocks else None
            blocks.append(_marked(name, first + 1, RUNNABLE[language], source + "\n", markers, previous))
    return blocks


def _marked(name: str, line: int, language: str, source: str, markers: list[str], previous: Block | None) -> Block:
    example = continues = False
    world = 0
    for marker in markers:
        if marker == "example":
            example = True
        elif marker == "continues" and language == "python":
            continues = True
        elif re.fullmatch(r"world=[1-9]\d*", marker) and language == "python":
            world = int(marker.removeprefix("world="))
        else:
            raise ValueError(f"{name}:{line}: unknown marker {marker!r} on a {language} block")
    if example and len(markers) > 1:
        raise ValueError(f"{name}:{line}: an example is not run, so it takes no other marker")
    if continues:
        if previous is None or previous.language != "python" or previous.example:
            raise ValueError(f"{name}:{line}: there is no Python block right before this one to continue")
        if world and world != previous.world:
            raise ValueError(f"{name}:{line}: continues a block on {previous.world} ranks, not {world}")
        world = previous.world
    return Block(name, line, language, source, example, continues, world)


def in_runs(blocks: list[Block]) -> list[list[Block]]:
    """Blocks that share a process: neighbors in Python; on several ranks, or in a shell, each with its own.

    Ranks cannot meet a second time at the same place, so there only blocks that continue share their processes.
    Examples do not count: they are not run.
    """
    runs: list[list[Block]] = []
    for block in blocks:
        if block.example:
            continue
        previous = runs[-1][-1] if runs else None
        together = previous is not None and previous.language == block.language == "python"
        if together and previous is not None and previous.world == block.world and (block.continues or not block.world):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
