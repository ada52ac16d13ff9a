"""What would make the measured steps faster: one line for each change, with the most that it can be worth.

A hint is only given where the table shows that the part in question takes a share worth having. What it is worth is the
time of that part, which no change can exceed: how much of it goes away is for the next measurement to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accelerate.devices import by_name

# Below this share of a step, a change is not worth anybody's time.
_WORTH_SAYING = 0.05


@dataclass(frozen=True)
class Facts:
    """What the hints depend on besides the times.

    unfused: the class names of optimizers that have a fused form for this device and do not use it.
    workers: the smallest number of workers of the prepared loaders, None if there are none with workers of their own.
    full_float32: whether products of float32 matrices are computed in full although the device has a faster form.
    """

    unfused: tuple[str, ...] = ()
    workers: int | None = None
    full_float32: bool = False


def hints(seconds: dict[str, float], facts: Facts) -> list[str]:
    """The changes that could pay off, the largest first. seconds: of each phase of a step, as in the table."""
    step = sum(seconds.values())
    computing = seconds["forward"] + seconds["backward"]
    found: list[tuple[float, str]] = []
    if facts.workers is not None:
        change = "num_workers=2 or more" if facts.workers == 0 else f"more than {facts.workers} workers"
        found.append((seconds["data"], f"{change} in the DataLoader"))
    if facts.unfused:
        found.append((seconds["optimizer"], f"fused=True in {' and '.join(facts.unfused)}"))
    if facts.full_float32:
        found.append((computing, 'mixed_precision="bf16", or torch.set_float32_matmul_precision("high")'))
    found.append((seconds["communication"], "larger batches or gradient_accumulation_steps"))
    return [
        f"hint: {change}: worth up to {worth * 1000:.2f} ms ({worth / step:.0%}) of a step"
        for worth, change in sorted(found, reverse=True)
        if worth >= _WORTH_SAYING * step > 0
    ]


def facts_of(accelerator: Any) -> Facts:
    device: torch.device = accelerator.device
    unfused = [
        optimizer.optimizer for optimizer in accelerator._optimizers if _could_be_fused(optimizer.optimizer, device)
    ]
    loaders = [loader for loader in accelerator._dataloaders if hasattr(loader, "num_workers")]
    return Facts(
        unfused=tuple(dict.fromkeys(type(optimizer).__name__ for optimizer in unfused)),
        workers=min((loader.num_workers for loader in loaders), default=None),
        full_float32=_full_float32(accelerator, device),
    )


def _could_be_fused(optimizer: Any, device: torch.device) -> bool:
    """On a CPU the fused forms are no faster, so nothing is said there."""
    if device.type != "cuda" or not isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)):
        return False
    return not any(group.get("fused") for group in optimizer.param_groups)


def _full_float32(accelerator: Any, device: torch.device) -> bool:
    """Devices that compute in bfloat16 have TensorFloat-32 as well: both came with the same generation."""
    if device.type != "cuda" or accelerator.mixed_precision != "no":
        return False
    return by_name(device.type).supports("bf16") and torch.get_float32_matmul_precision() == "highest"
