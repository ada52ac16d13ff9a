"""What a script for release 1.15 does with a tracker, for `test_released.py`: on this package and on the released one.

    python same.py NAME INIT_KWARGS_AS_JSON HOW

HOW: "accelerator" logs through an Accelerator; "alone" makes the tracker itself and starts it later, and prints what
can be seen of it before that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

CONFIG: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 4, "model": "small", "shuffled": True}
TEXT = {"text": "a word"}
SEVERAL = {"several": {"first": 1.0, "second": 2.0}}
# What each library takes beside numbers.
MORE: dict[str, dict[str, Any]] = {
    "aim": {},
    "clearml": {**TEXT, "eval_loss": 3.0},
    "comet_ml": {**TEXT, **SEVERAL},
    "dvclive": {**TEXT, "array": np.float32(1), "list": [1]},
    "mlflow": TEXT,
    "swanlab": {},
    "tensorboard": {**TEXT, **SEVERAL},
    "trackio": {**TEXT, **SEVERAL},
    "wandb": {**TEXT, **SEVERAL},
}


def picture(shade: int) -> Any:
    return np.full((8, 6, 3), shade, dtype=np.uint8)


def log_everything(tracker: Any, name: str) -> None:
    """Images and tables in the ways that each tracker of the release takes them, and its other methods."""
    several = [picture(0), Image.fromarray(picture(200))]
    if name == "aim":
        tracker.log_images({"picture": picture(0), "with words": (Image.fromarray(picture(200)), "a caption")}, step=3)
        tracker.log_images(
            {"more": picture(9)}, step=4, kwargs={"aim_image": {"quality": 50}, "track": {"context": {"a": "b"}}}
        )
    elif name == "clearml":
        tracker.log_images({"picture": picture(0), "eval_picture": Image.fromarray(picture(200))}, step=3)
    elif name == "tensorboard":
        tracker.log_images({"picture": np.stack([picture(0), picture(200)])}, step=3, dataformats="NHWC")
    elif hasattr(tracker, "log_images"):
        tracker.log_images({"picture": several, "other": several[:1]}, step=3)
    if hasattr(tracker, "log_table"):
        import pandas

        rows: list[list[Any]] = [["a", 1], ["b", 2]]
        tracker.log_table("answers", columns=["input", "output"], data=rows, step=4)
        tracker.log_table("eval_frame", dataframe=pandas.DataFrame(rows, columns=["input", "output"]), step=5)
        if name == "clearml":
            tracker.log_table("first row", data=[["input", "output"], *rows], step=6)
            tracker.log_table("no names", columns=[], data=rows, step=6)
    if name == "comet_ml":
        tracker.log({"text": "alone"}, step=2)  # what follows belongs to that step
    if name == "mlflow":
        import matplotlib.figure

        Path("notes").mkdir()
        Path("notes/a.txt").write_text("a")
        tracker.log_artifact("notes/a.txt", "single")
        tracker.log_artifacts("notes", "folder")
        tracker.log_figure(matplotlib.figure.Figure(), "figure.png")


def numbers(name: str, step: int) -> dict[str, Any]:
    return {"loss": 1.5 + step, "count": step, **MORE[name]}


def through_an_accelerator(name: str, init_kwargs: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, log_with=name, project_dir="project")
    accelerator.init_trackers("digits", config=CONFIG, init_kwargs={name: init_kwargs})
    for step in range(2):
        accelerator.log(numbers(name, step), step=step)
    log_everything(accelerator.get_tracker(name), name)
    accelerator.end_training()


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def alone(name: str, init_kwargs: dict[str, Any]) -> None:
    PartialState(cpu=True)
    kind = LOGGER_TYPE_TO_CLASS[name]
    before = files()
    folder = ["project"] if kind.requires_logging_directory else []
    tracker = kind("digits", *folder, **init_kwargs)
    try:
        seen = repr(tracker.tracker)
    except AttributeError as error:
        seen = type(error).__name__
    new = [path for path in files() if path not in before]
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log(numbers(name, 0), step=0)
    if name == "mlflow":
        tracker.store_init_configuration({"long": "x" * 10_000, "short": "y"})
    log_everything(tracker, name)
    tracker.finish()
    print(json.dumps({"before it starts": seen, "files before it starts": new}))


if __name__ == "__main__":
    {"accelerator": through_an_accelerator, "alone": alone}[sys.argv[3]](sys.argv[1], json.loads(sys.argv[2]))
