"""Showing the times of steps: one table for a person, a few numbers for the trackers."""

from __future__ import annotations

from accelerate.available import has_package

PHASES = ("data", "forward", "backward", "communication", "optimizer", "other")
# More ranks than this make a table nobody reads: then the slowest are shown, after the mean of all.
_MOST_ROWS = 16
_WIDTH = 100


def rows(seconds: list[dict[str, float]], slowest: int) -> list[list[str]]:
    """The lines of the table: a rank, milliseconds of each phase, and those of the whole step."""
    ranks = list(range(len(seconds)))
    lines = []
    if len(ranks) > _MOST_ROWS:
        lines.append(_line("mean", mean(seconds)))
        ranks.sort(key=lambda rank: seconds[rank]["communication"] - sum(seconds[rank].values()))
        ranks = ranks[:_MOST_ROWS]
    marked = slowest if len(seconds) > 1 else None
    return lines + [_line(f"{rank} (slowest)" if rank == marked else str(rank), seconds[rank]) for rank in ranks]


def _line(name: str, seconds: dict[str, float]) -> list[str]:
    return [name, *(f"{seconds[phase] * 1000:.2f}" for phase in PHASES), f"{sum(seconds.values()) * 1000:.2f}"]


def mean(seconds: list[dict[str, float]]) -> dict[str, float]:
    return {phase: sum(rank[phase] for rank in seconds) / len(seconds) for phase in PHASES}


def summary(seconds: list[dict[str, float]], slowest: int) -> dict[str, float]:
    """What the trackers get: the mean over all ranks in milliseconds, and which rank is the slowest."""
    average = mean(seconds)
    values = {f"step_time/{phase}_ms": average[phase] * 1000 for phase in PHASES}
    return values | {"step_time/step_ms": sum(average.values()) * 1000, "step_time/slowest_rank": slowest}


def print_table(seconds: list[dict[str, float]], slowest: int, steps: int) -> None:
    title = f"milliseconds per step, mean of {steps} steps"
    header = ["rank", *PHASES, "step"]
    lines = rows(seconds, slowest)
    if has_package("rich"):
        _print_rich(title, header, lines)
    else:
        _print_plain(title, header, lines)


def _print_rich(title: str, header: list[str], lines: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, justify="left" if name == "rank" else "right")
    for line in lines:
        table.add_row(*line, style="bold" if "slowest" in line[0] else None)
    console = Console()
    # A file or a pipe counts as 80 columns, which would break the lines.
    console = Console(width=_WIDTH) if console.width < _WIDTH and not console.is_terminal else console
    console.print(table)


def _print_plain(title: str, header: list[str], lines: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    print(title)
    for line in [header, *lines]:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())
