"""Checks what `accelerate launch` (or another launcher) tells a process; the processes do not talk to each other.

So it ends at once also where the other machines of a config file are not there.
"""

from __future__ import annotations

import os

from accelerate.config.enums import PrecisionType
from accelerate.environments import detect
from accelerate.test_utils.backend import device_count, torch_device
from accelerate.test_utils.checks import expect


def main() -> None:
    """Checks that this is one process of a world, with settings that can be used."""
    world = detect(os.environ)
    expect(0 <= world.rank < world.size, f"rank {world.rank} of {world.size} processes")
    expect(0 <= world.local_rank < world.local_size, f"local rank {world.local_rank} of {world.local_size} processes")
    expect(world.local_size <= world.size, f"{world.local_size} processes here, and {world.size} in all")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    expect(precision in PrecisionType.list(), f"mixed precision {precision!r}")
    print(f"Process {world.rank} of {world.size} ({world.started_by}) sees {device_count} x {torch_device}.")


if __name__ == "__main__":
    main()
