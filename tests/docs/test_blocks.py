"""The reader and the runner of code blocks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import Block, in_runs, read_blocks
from tests.docs.runner import check_examples, run_blocks
from tests.harness import WorldFailed


def blocks_of(tmp_path: Path, text: str) -> list[Block]:
    path = tmp_path / "page.md"
    path.write_text(text)
    return read_blocks(path, "page.md")


def run(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    run_blocks(blocks_of(tmp_path, text), folder)


def test_only_python_and_shell_are_read(tmp_path: Path) -> None:
    text = "a\n```python\nx = 1\n```\n```\nplain\n```\n```yaml\na: 1\n```\n```shell\nls\n```\n"
    first, second = blocks_of(tmp_path, text)
    assert (first.language, first.source, first.place) == ("python", "x = 1\n", "page.md:3")
    assert (second.language, second.source, second.place) == ("bash", "ls\n", "page.md:12")


def test_blocks_inside_lists_lose_their_indent(tmp_path: Path) -> None:
    (block,) = blocks_of(tmp_path, "- item\n\n  ```python\n  if True:\n\n      x = 1\n  ```\n")
    assert block.source == "if True:\n\n    x = 1\n"


def test_a_longer_fence_may_hold_a_shorter_one(tmp_path: Path) -> None:
    assert blocks_of(tmp_path, "````markdown\n```python\nnot code\n```\n````\n") == []


def test_markers(tmp_path: Path) -> None:
    text = "```python world=2\n```\n```python continues\n```\n```bash example\n```\n```python\n```\n"
    ranks, same, example, plain = blocks_of(tmp_path, text)
    assert (ranks.world, same.world, same.continues) == (2, 2, True)
    assert example.example and not (plain.example or plain.continues or plain.world)
    assert in_runs([ranks, same, example, plain]) == [[ranks, same], [plain]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python skip\n```\n", "unknown marker 'skip'"),
        ("```bash world=2\n```\n", "unknown marker 'world=2' on a bash block"),
        ("```python world=0\n```\n", "unknown marker 'world=0'"),
        ("```python example world=2\n```\n", "takes no other marker"),
        ("```python continues\n```\n", "no Python block right before"),
        ("```bash\n```\n```python continues\n```\n", "no Python block right before"),
        ("```python\n```\n```python continues world=2\n```\n", "on 0 ranks, not 2"),
        ("```python\nx = 1\n", "never closed"),
    ],
)
def test_wrong_markers_are_errors(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        blocks_of(tmp_path, text)


def test_namespaces_and_files(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
```python
x = 1
open("note", "w").write("written by Python")
```
```python continues
assert x == 1
```
```python
assert "x" not in globals() and __name__ == "__main__"
```
```bash
grep Python note
python -c 'import sys; print(sys.version)' > version
```
```python
import os
assert os.path.exists("version") and "RANK" not in os.environ
```
""",
    )


def test_world_blocks_run_on_that_many_ranks(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
```python world=2
import torch.distributed as dist
dist.init_process_group("gloo")
open(f"rank{dist.get_rank()}of{dist.get_world_size()}", "w").close()
```
""",
    )
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["rank0of2", "rank1of2"]


def test_a_failing_python_block_names_document_and_line(tmp_path: Path) -> None:
    with pytest.raises(WorldFailed) as caught:
        run(tmp_path, "text\n\n```python\nx = 1\nassert x == 2\n```\n")
    assert 'File "page.md", line 5, in <module>\n    assert x == 2' in str(caught.value)


def test_a_failing_shell_block_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page.md:2: exit code 1\nbefore"):
        run(tmp_path, "```bash\necho before\nfalse\necho after\n```\n")


def test_examples_are_checked_but_not_run(tmp_path: Path) -> None:
    blocks = blocks_of(tmp_path, "```bash example\ntouch made\n```\n```python example\n1 / 0\n```\n")
    check_examples(blocks)
    run_blocks(blocks, tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("text", "kind"),
    [("```bash example\nif true\n```\n", AssertionError), ("```python example\nx =\n```\n", SyntaxError)],
)
def test_an_example_that_is_no_code_fails(tmp_path: Path, text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        check_examples(blocks_of(tmp_path, text))


def test_shell_blocks_cannot_wait_for_input(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
        run(tmp_path, "```bash\nread answer\n```\n")
