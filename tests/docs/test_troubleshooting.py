"""Every message that docs/troubleshooting.md and docs/deepspeed.md explain is one that the package gives."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _texts() -> str:
    """The strings of the package, with what is put into them left out."""
    found = []
    for path in (ROOT / "src" / "accelerate").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found).replace("`", "")


def _messages() -> list[str]:
    """What is quoted in the first column of the tables of messages."""
    page = "".join((ROOT / "docs" / name).read_text() for name in ("troubleshooting.md", "deepspeed.md"))
    tables = re.findall(r"(?m)^\| (?:message|you see|a rank …|likely reason) \|.*\n\|-.*\n((?:\|.*\n)+)", page)
    rows = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [message for row in rows for message in re.findall("`([^`]+)`", row)]


def _is_given(message: str, texts: str) -> bool:
    """Whether half of its pairs of words are in the package, but for those with a number, a name or an error of the
    example."""
    words = message.split()
    pairs = [f"{one} {two}" for one, two in pairwise(words)]
    pairs = [pair for pair in pairs if not re.search(r"[\d'/()]|[A-Z]_[A-Z]|Error|\.\.\.", pair)] or words[:1]
    return 2 * sum(pair in texts for pair in pairs) >= len(pairs)


def test_messages_are_those_of_the_package() -> None:
    texts, messages = _texts(), _messages()
    assert len(messages) > 40
    assert [message for message in messages if not _is_given(message, texts)] == []
    assert not _is_given("Rank 1 unplugged its machine at noon", texts)
