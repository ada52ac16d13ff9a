"""What the ranks of a run have written down: which samples counted in the end, and which were rolled back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.train import SAMPLES


@dataclass(frozen=True)
class History:
    """samples: what each rank has trained on, by (step, rank). starts: step and number of processes of each start."""

    samples: dict[tuple[int, int], tuple[int, list[int]]]
    starts: list[tuple[int, int]]
    weights: dict[int, str]

    def epochs(self) -> dict[int, list[int]]:
        """The samples of each epoch, sorted."""
        found: dict[int, list[int]] = {}
        for epoch, ids in self.samples.values():
            found.setdefault(epoch, []).extend(ids)
        return {epoch: sorted(ids) for epoch, ids in sorted(found.items())}

    def check_epochs(self, number: int) -> None:
        """Every sample was trained on exactly once in each epoch."""
        epochs = self.epochs()
        assert list(epochs) == list(range(number)), list(epochs)
        for epoch, ids in epochs.items():
            assert ids == list(range(SAMPLES)), f"epoch {epoch}: {_difference(ids)}"


def _difference(ids: list[int]) -> str:
    missing = sorted(set(range(SAMPLES)) - set(ids))
    twice = sorted({number for number in ids if ids.count(number) > 1})
    return f"missing {missing}, more than once {twice}"


def lines(log: Path) -> list[dict[str, Any]]:
    """All lines of all ranks; one that is being written is left out."""
    found = []
    for path in log.glob("rank*"):
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            found.append({"rank": int(path.name.removeprefix("rank")), **json.loads(line)})
    return found


def newest_step(log: Path) -> int:
    """How far the run has come that runs now, or ran last."""
    found = lines(log)
    last = max((line["start"] for line in found), default=0)
    return max((line["step"] for line in found if line["start"] == last), default=0)


def read(log: Path) -> History:
    found = lines(log)
    began = {line["start"]: (line["step"], line["processes"]) for line in found if "begins" in line}
    samples: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for line in found:
        later = [step for start, (step, _) in began.items() if start > line["start"]]
        if "samples" in line and all(line["step"] <= step for step in later):
            key = (line["step"], line["rank"])
            assert key not in samples, f"step {key[0]} counts twice on rank {key[1]}"
            samples[key] = (line["epoch"], line["samples"])
    weights = {line["rank"]: line["weights"] for line in found if "weights" in line}
    return History(samples, [began[start] for start in sorted(began)], weights)
