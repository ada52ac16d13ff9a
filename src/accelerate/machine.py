"""Ports of this machine, its kernel, and what a notebook server installs on it."""

from __future__ import annotations

import logging
import platform
import re
import socket
import subprocess
import sys

logger: logging.Logger = logging.getLogger(__name__)

_OLDEST_KERNEL = (5, 5, 0)


def is_port_in_use(port: int | None = None) -> bool:
    """Tell whether a port of this machine is in use.

    Args:
        port: the port. By default that of torch, 29500.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_os_kernel() -> None:
    """Warn about a Linux kernel that is known to make multi-process runs hang."""
    if platform.system() != "Linux":
        return
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", platform.release())
    if match and tuple(int(part or 0) for part in match.groups()) < _OLDEST_KERNEL:
        logger.warning(
            f"The Linux kernel {match.group()} may make processes hang; use "
            f"{'.'.join(map(str, _OLDEST_KERNEL))} or newer."
        )


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits torch, in a Google Colab notebook.

    Args:
        upgrade: upgrade torch first.
    """
    if "google.colab" not in sys.modules:
        raise RuntimeError("`install_xla` is for Google Colab notebooks: elsewhere, `pip install torch_xla[tpu]`.")
    install = [sys.executable, "-m", "pip", "install"]
    if upgrade:
        subprocess.run([*install, "--upgrade", "torch"], check=True)
    ask = [sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"]
    version = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    wheels = "https://storage.googleapis.com/libtpu-releases/index.html"
    subprocess.run([*install, f"torch_xla[tpu]=={version}", "--find-links", wheels], check=True)
