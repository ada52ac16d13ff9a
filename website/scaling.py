"""What many ranks tell each other, as it was counted: a table for docs/scaling.md, and its plot."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "scaling.json"
DOCUMENT = ROOT / "docs" / "scaling.md"
TABLE = re.compile(r"(<!-- table: made by `make bench-scale` -->\n).*?(\n<!-- end of table -->)", re.S)

_STORE, _SENT, _GOT = "requests to the store", "messages that rank 0 sends", "bytes that a rank gets"
# What a row says, the phase that was counted, and what of it.
ROWS = [
    ("**a start**: requests to the store", "start", _STORE),
    ("collectives", "start", "collectives"),
    ("**a step**: requests to the store", "step", _STORE),
    ("collectives, beside those of DDP", "step", "collectives"),
    ("processor time of a rank, ms", "step", "time"),
    ("**a gather** of one number: collectives", "gather", "collectives"),
    ("messages that each rank sends", "gather", _SENT),
    ("KiB that each rank gets", "gather", _GOT),
    ("**a save**: requests to the store", "save", _STORE),
    ("collectives", "save", "collectives"),
    ("messages that rank 0 sends", "save", _SENT),
    ("KiB that each rank gets", "save", _GOT),
    ("processor time of rank 0, ms", "save", "time"),
    ("**its files**: number", "checkpoint", "files"),
    ("KiB of the manifest", "checkpoint", "bytes of the manifest"),
    ("KiB of the files of single ranks", "checkpoint", "bytes of those"),
    ("**a load**: how often the manifest is read", "load", "manifests read"),
    ("collectives", "load", "collectives"),
    ("messages that rank 0 sends", "load", _SENT),
    ("KiB that each rank gets", "load", _GOT),
    ("processor time of rank 0, ms", "load", "time"),
    ("**a minute** of training: requests to the store", "minute of training", _STORE),
    ("in which all wait in one call", "minute of waiting", _STORE),
    ("of work without a collective", "minute of working", _STORE),
    ("**an agreement to stop**: requests to the store", "stop", _STORE),
]
LINES = {
    "an agreement to stop": ("stop", "b"),
    "a save": ("save", "c"),
    "a start": ("start", "a"),
    "a minute without a collective": ("minute of working", "b"),
}
LEFT, RIGHT, TOP, BOTTOM, WIDTH = 70, 520, 44, 300, 760


def worlds() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["simulated"]
    return found


def value(world: dict[str, Any], phase: str, what: str) -> float:
    """One figure of a world; 0 for what did not come up in it."""
    per_step = 4 if phase == "step" else 1
    if what == "time":
        return float(world["processor seconds"][phase]) * 1e3 / per_step
    counted = world["checkpoint"] if phase == "checkpoint" else world["phases"].get(phase, {})
    return float(counted.get(what, 0)) / per_step / (1024 if "bytes" in what else 1)


def table() -> str:
    """The table of the document."""
    shown = worlds()
    lines = [["ranks", *(f"{world['ranks']:,}" for world in shown)], ["---", *["---:"] * len(shown)]]
    for label, phase, what in ROWS:
        digits = ".1f" if what == "time" else ".0f"
        lines.append([label, *(f"{value(world, phase, what):,{digits}}" for world in shown)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Curves:
    """Requests to the store by ranks, both on scales of powers."""

    title: str
    lines: dict[str, tuple[str, list[tuple[int, float]]]]

    def svg(self, style: str) -> str:
        ranks = sorted({many for _, points in self.lines.values() for many, _ in points})
        highest = max(math.ceil(math.log10(max(y, 1))) for _, points in self.lines.values() for _, y in points)

        def across(many: int) -> float:
            return LEFT + (RIGHT - LEFT) * math.log(many) / math.log(ranks[-1])

        def up(count: float) -> float:
            return BOTTOM - (BOTTOM - TOP) * math.log10(max(count, 1)) / highest

        parts = [f'<text x="10" y="20" class="t">{self.title}</text>']
        for power in range(highest + 1):
            y = up(10**power)
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:g}" class="s e">{10**power:,}</text>')
            parts.append(f'<path d="M{LEFT} {y:g}H{RIGHT}" class="a" stroke-opacity="0.2"/>')
        parts += [f'<text x="{across(many):.1f}" y="{BOTTOM + 18}" class="s e">{many:,}</text>' for many in ranks]
        parts.append(f'<text x="{RIGHT + 12}" y="{BOTTOM + 18}" class="s">ranks</text>')
        ends: list[float] = []
        for label, (color, points) in sorted(self.lines.items(), key=lambda line: -line[1][1][-1][1]):
            way = "L".join(f"{across(many):.1f} {up(count):.1f}" for many, count in points)
            parts.append(f'<path d="M{way}" class="{color}" style="fill: none; stroke-width: 2"/>')
            y = max([up(points[-1][1]) + 4, *(end + 16 for end in ends)])
            ends.append(y)
            parts.append(f'<text x="{RIGHT + 12}" y="{y:.1f}" class="s">{label}: {points[-1][1]:,.0f}</text>')
        size = f'viewBox="0 0 {WIDTH} {BOTTOM + 34}" width="{WIDTH}" height="{BOTTOM + 34}"'
        head = f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" {size}>'
        return "\n".join([head, style, *parts, "</svg>", ""])


def curves() -> Curves:
    shown = [world for world in worlds() if world["ranks"] > 1]
    return Curves(
        "Requests to the store of rank 0, of all ranks together",
        {
            label: (color, [(world["ranks"], value(world, phase, _STORE)) for world in shown])
            for label, (phase, color) in LINES.items()
        }
        | {"a step": ("c", [(world["ranks"], value(world, "step", _STORE)) for world in shown])},
    )


def with_table(text: str) -> str:
    """The document with the table of the kept results."""
    return TABLE.sub(lambda found: found.group(1) + table() + found.group(2), text)


def main() -> None:
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
