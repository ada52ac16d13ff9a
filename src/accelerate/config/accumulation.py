"""How gradients are accumulated over several batches."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.config.handlers import KwargsHandler


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How often an optimizer steps, and what happens at the end of the data.

    Args:
        num_steps: batches per optimizer step.
        adjust_scheduler: accepted as in the 1.15 release, where it changes nothing either.
        sync_with_dataloader: step at the last batch of a loader even if the window is not full.
        sync_each_batch: average gradients between processes at every batch: slower, less memory.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
