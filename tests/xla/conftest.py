"""The real torch_xla, which compiles for the CPU. Processes of tests import it; the one that forks them must not."""

from __future__ import annotations

import os

os.environ["PJRT_DEVICE"] = "CPU"
