"""Reporting: what a run tells a person, and its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.accelerator.base import AcceleratorBase
from accelerate.config.handlers import ProfileKwargs
from accelerate.constants import PROFILE_PATTERN_NAME


class Reporting(AcceleratorBase):
    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Run the block under torch's profiler, which it receives.

        With `output_trace_dir` each process writes a trace that a browser's tracing page opens.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        folder = Path(handler.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(os.fspath(folder / PROFILE_PATTERN_NAME.format(suffix=self.process_index)))
        self.wait_for_everyone()

    def end_training(self) -> None:
        """Say that training is over: the process group is taken down."""
        self.state.destroy_process_group()
