"""How gradients are accumulated over several batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from accelerate.config.handlers import KwargsHandler


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How often an optimizer steps, and what happens at the end of the data."""

    num_steps: int | None = field(default=None, metadata={"help": "Batches per optimizer step."})
    adjust_scheduler: bool = field(
        default=True,
        metadata={"help": "Accepted as in the 1.15 release, where it changes nothing either."},
    )
    sync_with_dataloader: bool = field(
        default=True, metadata={"help": "Step at the last batch of a loader even if the window is not full."}
    )
    sync_each_batch: bool = field(
        default=False,
        metadata={"help": "Average gradients between processes at every batch: slower, less memory."},
    )
