"""Measure this package, the released peer and plain PyTorch beside each other on CPU, and print one table."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import cli
import dispatch
import gather
import harness
import imports
import loader
import report
import step

GROUPS = {"step": step, "loader": loader, "gather": gather, "dispatch": dispatch}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*GROUPS, "imports", "cli"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="few rounds: a rough picture in about a minute")
    parser.add_argument("--peer", type=Path, default=harness.REPOSITORY / ".venv-peer/bin/python", help="its python")
    parser.add_argument("--json", type=Path, default=harness.HERE / "results.json", help="where the medians go")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if not options.peer.exists():
        print(
            f"There is no {options.peer}; `make bench` makes it, or name another with --peer.",
            file=sys.stderr,
        )
        return 2
    who = harness.subjects(str(options.peer.absolute()))
    figures = [figure for name, group in GROUPS.items() if name in options.only for figure in group.figures()]
    if options.quick:
        figures = [dataclasses.replace(f, rounds=10, seconds=2.5, restarts=1) for f in figures]
    rows: list[harness.Row] = []
    began = time.monotonic()
    names = ("plain", "peer", "ours") if figures else ()
    worlds = {name: harness.World(who[name], 2, "cpu") for name in names}
    try:
        about = harness.introduce(worlds)
        for figure in figures:
            print(f"{time.monotonic() - began:4.0f} s  {figure.name}", file=sys.stderr, flush=True)
            rows.append(harness.measure(figure, worlds, fork=True))
    finally:
        for world in worlds.values():
            world.kill()
    if "imports" in options.only:
        print(f"{time.monotonic() - began:4.0f} s  imports", file=sys.stderr, flush=True)
        rows += imports.measure(who["peer"], who["ours"], rounds=2 if options.quick else 7)
    if "cli" in options.only:
        print(f"{time.monotonic() - began:4.0f} s  command line", file=sys.stderr, flush=True)
        rows += cli.measure(who["peer"], who["ours"], rounds=2 if options.quick else 7)
    info = report.machine(about)
    report.show(rows, info)
    report.save(options.json, rows, info)
    print(f"medians in {options.json}; took {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if any(row.compared == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
