"""How tests start scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.test_utils.backend import device_count


def get_launch_command(**kwargs: Any) -> list[str]:
    """Build an `accelerate launch` command.

    Args:
        **kwargs: flags by name: True adds `--name`, None adds nothing, any other value adds `--name=value`.

    Returns:
        The words of the command.
    """
    command = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None:
            command.append(f"--{name}={value}")
    return command


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def path_in_accelerate_package(*components: str) -> Path:
    """Return the path of a file inside the installed package.

    Args:
        *components: the parts of the path.
    """
    return Path(__file__).parent.parent.joinpath(*components)
