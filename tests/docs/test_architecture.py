"""What docs/architecture.md says of engines: it names all that one may take over, and nothing else."""

from __future__ import annotations

import re

from accelerate.strategies import Strategy
from tests.docs.file_map import PAGE

_TABLE = re.compile(r"### What an engine may take over\n.*?\n\n(\|.*?)\n\n", re.DOTALL)


def _answers() -> set[str]:
    """The names in the second column of the table."""
    found = _TABLE.search(PAGE.read_text())
    assert found is not None
    rows = [row.rpartition(" | ")[2] for row in found.group(1).splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", row)} - {"Stepper", "module"}


def test_all_that_an_engine_may_take_over_is_named() -> None:
    # What an engine is told, and does not answer.
    told = {"gradient_state", "precision", "accelerator"}
    public = {name for name in {*vars(Strategy), *Strategy.__annotations__} if not name.startswith("_")}
    assert told <= public
    assert _answers() == public - told
