"""Curves for the eye: as many points as a screen has room for, of however many there are."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Any

from accelerate.runs.read import Project

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Points that stay in memory between questions; beyond it, those of the series that nobody has asked for longest go.
CAPACITY = 20_000_000
# Places of values that are no numbers: of more than these a person learns nothing new.
_MOST_BAD = 50


class Curves:
    """The points of a project's series, of which only the new ones are read each time."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._known: OrderedDict[int, tuple[int, NDArray[np.float64]]] = OrderedDict()

    def of(self, series: int) -> NDArray[np.float64]:
        """Rows of step, time and value."""
        import numpy as np

        last, points = self._known.pop(series, (-1, np.empty((0, 3))))
        # Numbers one by one, which is several times as fast as rows. (Their own numbers fit into a float, too.)
        new = np.fromiter(chain.from_iterable(self._project.points(series, last)), dtype=np.float64).reshape(-1, 4)
        if len(new):
            last, points = int(new[-1, 3]), np.concatenate([points, new[:, :3]])
        self._known[series] = last, points
        while len(self._known) > 1 and sum(len(kept) for _, kept in self._known.values()) > CAPACITY:
            self._known.popitem(last=False)
        return points


def bucketed(
    x: NDArray[np.float64], y: NDArray[np.float64], low: float | None, high: float | None, most: int
) -> dict[str, Any]:
    """The curve between low and high in at most so many buckets.

    x: the middle of each. y, least, most: mean, least and greatest value. count: how many points it stands for.
    bad: where values are not finite.
    """
    import numpy as np

    inside = np.isfinite(x)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    x, y = x[inside], y[inside]
    finite = np.isfinite(y)
    bad = np.unique(x[~finite])[:_MOST_BAD]
    x, y = x[finite], y[finite]
    found: dict[str, Any] = {"bad": _listed(bad)}
    if len(x) > 1 and bool((np.diff(x) < 0).any()):  # a run that went on from an earlier step
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    if len(x) <= most:
        values = _listed(y)
        return {**found, "x": _listed(x), "y": values, "least": values, "most": values, "count": [1] * len(x)}
    width = (x[-1] - x[0]) / most
    bucket = np.zeros(len(x), dtype=np.int64) if width == 0 else np.minimum((x - x[0]) / width, most - 1).astype(int)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(starts, append=len(x))
    with np.errstate(over="ignore"):
        mean = np.add.reduceat(y, starts) / counts
    return {
        **found,
        "x": _listed(np.add.reduceat(x, starts) / counts),
        "y": _listed(mean),
        "least": _listed(np.minimum.reduceat(y, starts)),
        "most": _listed(np.maximum.reduceat(y, starts)),
        "count": counts.tolist(),
    }


def _listed(values: NDArray[np.float64]) -> list[float | None]:
    """Numbers with the digits that a screen can show, which makes them half as long."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | None:
    if not math.isfinite(value):  # the mean of numbers that are too large to be added
        return None
    return int(value) if value == int(value) and math.fabs(value) < 1e15 else float(f"{value:.9g}")
