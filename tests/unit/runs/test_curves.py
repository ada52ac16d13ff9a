"""Curves in as many points as a screen has."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accelerate.runs import curves, store
from accelerate.runs.curves import Curves, bucketed
from accelerate.runs.read import Project
from tests.unit.runs.toys import write


def test_a_million_points(tmp_path: Path) -> None:
    """A spike of one point among a million is seen, and the answer is small."""
    count = 1_000_000
    path = write(tmp_path, logs=[{"loss": 0.0}])
    with store.writing(path) as connection:
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
            " INSERT INTO points SELECT 1, 9000000000000000 + i, i, 0, (i = 654321) * 100 + (i % 2) FROM n",
            (count,),
        )
    [series] = [each.series for each in Project(path).runs()[0].metrics]
    points = Curves(Project(path)).of(series)
    found = bucketed(points[:, 0], points[:, 2], None, None, 500)
    assert sum(found["count"]) == count + 1
    assert len(found["x"]) == 500 == len(found["y"])
    assert max(found["most"]) == 101 and min(found["least"]) == 0
    spike = found["most"].index(101)
    assert abs(found["x"][spike] - 654321) < 2 * count / 500
    assert len(json.dumps(found)) < 40_000
    near = bucketed(points[:, 0], points[:, 2], 654311, 654331, 500)
    assert near["x"] == list(range(654311, 654332)) and near["y"][10] == 101


def test_few_points_stay_as_they_are() -> None:
    found = bucketed(np.array([0.0, 1, 2]), np.array([0.1, 0.2, 1 / 3]), None, None, 3)
    assert found == {
        "x": [0, 1, 2], "y": [0.1, 0.2, 0.333333333], "least": [0.1, 0.2, 0.333333333],
        "most": [0.1, 0.2, 0.333333333], "count": [1, 1, 1], "bad": [],
    }  # fmt: skip


def test_what_is_not_a_number_is_told_apart() -> None:
    found = bucketed(np.arange(5.0), np.array([1, math.nan, math.inf, 4, -math.inf]), None, None, 10)
    assert (found["x"], found["y"], found["bad"]) == ([0, 3], [1, 4], [1, 2, 4])
    empty = bucketed(np.array([]), np.array([]), None, None, 10)
    assert empty["x"] == empty["bad"] == []


def test_steps_that_go_back_and_values_beyond_all_bounds() -> None:
    """A run that goes on from an earlier checkpoint repeats steps."""
    found = bucketed(np.array([0.0, 1, 2, 1, 2, 3]), np.array([0.0, 1, 2, 10, 20, 30]), None, None, 10)
    assert (found["x"], found["y"]) == ([0, 1, 1, 2, 2, 3], [0, 1, 10, 2, 20, 30])
    huge = bucketed(np.zeros(4), np.full(4, 1.7e308), None, None, 2)
    assert (huge["y"], huge["most"], huge["count"]) == ([None], [1.7e308], [4])
    json.dumps(huge, allow_nan=False)


def test_only_what_is_new_is_read_and_memory_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, logs=[{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 6.0}])
    project = Project(path)
    known = Curves(project)
    asked = []

    def points(series: int, after: int = -1) -> Iterator[tuple[float, float, float | str, int]]:
        asked.append(after)
        return Project.points(project, series, after)

    monkeypatch.setattr(project, "points", points)
    assert known.of(1)[:, 2].tolist() == [1, 2]
    with store.writing(path) as connection:
        connection.execute("INSERT INTO points SELECT 1, number + 100, 2, time, 3 FROM points WHERE value = 2")
    assert known.of(1)[:, 2].tolist() == [1, 2, 3]
    assert asked[0] == -1 and asked[1] > 0
    monkeypatch.setattr(curves, "CAPACITY", 4)
    assert known.of(2)[:, 2].tolist() == [5, 6]
    assert known.of(1)[:, 2].tolist() == [1, 2, 3]
    assert asked[3] == -1  # it had to go for the other
