"""A sharded stream of Hugging Face datasets: each process reads the same as with the released package."""

from __future__ import annotations

from pathlib import Path

from tests.clients.test_trainers import RELEASED, logs, pytestmark  # noqa: F401  (the mark skips this file, too)


def test_shards_are_shared_out_by_the_dataset(tmp_path: Path) -> None:
    ours = logs("read_datasets.py", 2, {}, tmp_path / "ours.json", "")
    assert ours == logs("read_datasets.py", 2, {}, tmp_path / "released.json", str(RELEASED))
    assert ours["4"][0] == ["IterableDataset", [[0, 1], [2, 3], [100, 101], [102, 103]]]
