"""A small training for `test_libraries.py`: logs everything a tracker takes. Run in a process and a folder of its own,
because these libraries leave threads, children and variables behind.

    python train.py NAME [INIT_KWARGS as JSON [bad]]

With "bad", every call has a value among the others that no library takes.
"""

import json
import sys

import numpy as np
import torch

from accelerate import Accelerator


def main() -> None:
    name, init_kwargs = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    accelerator = Accelerator(cpu=True, log_with=name, project_dir="project")
    config = {"learning_rate": 0.1, "batch_size": 4, "model": "small", "layers": [1, 2]}
    accelerator.init_trackers("digits", config=config, init_kwargs={name: init_kwargs})
    running = torch.zeros(())
    bad = {"bad": object()} if "bad" in sys.argv else {}
    for step in range(3):
        running += 1  # in place: what was logged is the value at that time
        accelerator.log({**bad, "loss": running, "accuracy": np.float32(0.25 * step), "count": step}, step=step)
    tracker = accelerator.get_tracker(name)
    if hasattr(tracker, "log_images"):
        image = np.zeros((8, 8, 3), dtype=np.uint8)
        values = {"picture": image if name in ("aim", "clearml") else np.stack([image, image])}
        more = {"tensorboard": {"dataformats": "NHWC"}}
        accelerator.log_images(values, step=3, log_kwargs=more)
    if hasattr(tracker, "log_table"):
        accelerator.log_table("answers", columns=["input", "output"], data=[["a", 1], ["b", 2]], step=3)
    if accelerator.is_main_process:
        assert accelerator.get_tracker(name, unwrap=True) is tracker.tracker
    accelerator.end_training()
    if name == "mlflow":
        import mlflow

        assert mlflow.active_run() is None


if __name__ == "__main__":
    main()
