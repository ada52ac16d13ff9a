"""fp16: autocast, and a loss scaled up so that small gradients do not vanish."""

from __future__ import annotations

import torch

from accelerate.precision.autocast import Autocast


class Scaled(Autocast):
    mode = "fp16"
    dtype: torch.dtype = torch.float16
    scales = True
