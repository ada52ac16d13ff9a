"""`accelerate runs`: what trainings with `log_with="local"` have written, in the terminal, on a page or in one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.commands.utils import command_parser, run_command, whole_number
from accelerate.errors import CommandFailed
from accelerate.text import convert_bytes, did_you_mean

if TYPE_CHECKING:
    from accelerate.runs.read import Project, RecordedRun

DESCRIPTION = """Show the runs of a project that were recorded with `log_with="local"`: a list with the state and the
main metric of each; with --run one or several of them, side by side.

--serve shows them on a page in a browser of this machine, with live curves of running trainings.
--export puts that page with all its data into one file, to send to a colleague."""


def runs_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Build the parser of `accelerate runs`."""
    parser = command_parser("runs", subparsers, DESCRIPTION)
    parser.add_argument(
        "folder",
        nargs="?",
        default=None,
        help="the `project_dir` of the runs; default: this folder, or the only project below it",
    )
    parser.add_argument(
        "--run", type=whole_number, nargs="+", default=None, metavar="N", help="only these runs, side by side"
    )
    parser.add_argument("--metric", default=None, help="the metric to list; by default the first loss")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", action="store_true", help="show a page, until Control-C")
    parser.add_argument(
        "--port", type=whole_number, default=None, help="the port of the page; by default any that is free"
    )
    parser.add_argument(
        "--export", default=None, metavar="FILE", help="write the page with its data into one HTML file"
    )
    parser.set_defaults(func=runs_command)
    return parser


def runs_command(args: argparse.Namespace) -> None:
    """Show, serve or write the runs that the arguments name."""
    from accelerate.runs.read import Project, find

    if args.port is not None and not args.serve:
        raise CommandFailed("--port is the port of the page: pass --serve as well.")
    project = Project(find(args.folder))
    runs = _chosen(project.runs(), args.run)
    if args.export is not None:
        _export(project, args)
    if args.serve:
        _serve(project, args)
    elif args.json:
        from accelerate.runs.page import Page, to_json

        print(to_json(Page(project, args.run).overview(), indent=2))
    elif args.export is None:
        _show(project, runs, args)


def _chosen(runs: list[RecordedRun], numbers: list[int] | None) -> list[RecordedRun]:
    known = [run.number for run in runs]
    for number in numbers or ():
        if number not in known:
            raise CommandFailed(f"There is no run {number}: the runs are {', '.join(map(str, known)) or 'none'}.")
    return [run for run in runs if numbers is None or run.number in numbers]


def _show(project: Project, runs: list[RecordedRun], args: argparse.Namespace) -> None:
    from rich.console import Console

    from accelerate.runs import terminal

    names = dict.fromkeys(each.name for run in runs for each in run.metrics)
    if args.metric is not None and args.metric not in names:
        known = ", ".join(map(repr, names)) or "none"
        near = did_you_mean(args.metric, names)
        raise CommandFailed(f"No run has a metric {args.metric!r}{near}: there are {known}.")
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # in a file or a pipe no line is cut
    console.print(terminal.list_of(project, runs, args.metric, console.width))
    for line in terminal.reasons(runs):
        console.print(line)
    for table in terminal.comparison(project, runs) if args.run is not None else ():
        console.print(table)


def _serve(project: Project, args: argparse.Namespace) -> None:
    from accelerate.runs.page import Page
    from accelerate.runs.serve import Server

    try:
        server = Server(Page(project, args.run), args.port or 0)
    except (OSError, OverflowError) as error:
        raise CommandFailed(f"Port {args.port} cannot be used ({error}): give another, or none for any.") from None
    with server:
        print(f"The runs of {project.path} are shown at\n\n    {server.url}\n\nuntil Control-C.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _export(project: Project, args: argparse.Namespace) -> None:
    from accelerate.runs.page import Page, one_file

    place = Path(args.export).expanduser()
    text = one_file(Page(project, args.run))
    try:
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(
            f"--export cannot write {place} ({error.strerror}): name a file in a folder that exists and that you may "
            "write to."
        ) from None
    print(f"{place} holds the page with all its data ({convert_bytes(len(text.encode()))}); any browser opens it.")


def main() -> None:
    """Run `python -m accelerate.commands.runs`."""
    run_command(runs_command_parser())


if __name__ == "__main__":
    main()
