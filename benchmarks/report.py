"""The table on stdout and the JSON file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Row

COLUMNS = ("figure", "plain", "peer", "ours", "ours against", "target", "met")


def machine(about: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Where and with what the figures were taken; `about` is what each subject said of itself."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "subjects": about,
    }


def lines(row: Row) -> tuple[str, ...]:
    # What the feeding of batches is compared with is compute alone; it stands under the plain figure.
    plain = "\n".join(
        text if name == "plain" else f"{name} {text}"
        for name, text in row.cells.items()
        if name in ("plain", "compute")
    )
    met = {True: "yes", False: "NO", None: "-"}[row.met]
    peer, ours = (row.cells.get(name, "-") for name in ("peer", "ours"))
    return row.name, plain or "-", peer, ours, row.compared, row.target, met


def show(rows: Sequence[Row], info: dict[str, Any]) -> None:
    for name, about in info["subjects"].items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in about.items()))
    torches = {about["torch"] for about in info["subjects"].values() if "torch" in about}
    if len(torches) > 1:
        print("The subjects ran on different builds of torch; figures that differ may be torch's doing.")
    print(f"{info['cores']} cores, load {info['load_average']:.2f}, Python {info['python']}, {info['date']}")
    table = [lines(row) for row in rows]
    if sys.stdout.isatty():
        try:
            show_rich(table)
            return
        except ImportError:
            pass
    show_plain(table)


def show_rich(table: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    view = Table(*COLUMNS, show_lines=True)
    for cells in table:
        style = {"yes": "green", "NO": "red"}.get(cells[-1], "")
        view.add_row(*cells[:-1], f"[{style}]{cells[-1]}[/]" if style else cells[-1])
    Console().print(view)


def show_plain(table: Sequence[tuple[str, ...]]) -> None:
    flat = [COLUMNS, *[tuple(cell.replace("\n", ", ") for cell in cells) for cells in table]]
    widths = [max(len(cells[i]) for cells in flat) for i in range(len(COLUMNS))]
    for number, cells in enumerate(flat):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def save(path: Path, rows: Sequence[Row], info: dict[str, Any]) -> None:
    """Write the raw figures; without the folders of this machine, which mean nothing on another."""
    subjects = {
        name: {key: value for key, value in about.items() if key != "path"} for name, about in info["subjects"].items()
    }
    info = {**info, "subjects": subjects}
    figures = [{"figure": r.name, "target": r.target, "met": r.met, **r.raw} for r in rows]
    path.write_text(json.dumps({"machine": info, "figures": figures}, indent=2) + "\n")
