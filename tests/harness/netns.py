"""Two machines on one: network namespaces with an address each, joined by a cable that can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Machine:
    name: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """`words` as a command that runs on this machine."""
        return ["ip", "netns", "exec", self.name, *words]

    def enter(self) -> None:
        """Move the calling process to this machine."""
        with open(f"/run/netns/{self.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")

    @property
    def variables(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": self.interface}

    def cut_off(self) -> None:
        """Pull the cable: nothing that is sent arrives, and nobody is told."""
        _ip("-n", self.name, "link", "set", self.interface, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        _ip("-n", self.name, "link", "set", self.interface, "up")

    def ports(self) -> set[int]:
        """The ports on which something listens here."""
        lines = subprocess.run(self.command("cat", "/proc/net/tcp", "/proc/net/tcp6"), capture_output=True, text=True)
        fields = (line.split() for line in lines.stdout.splitlines())
        return {int(words[1].rsplit(":", 1)[1], 16) for words in fields if len(words) > 3 and words[3] == "0A"}


def can_be_had() -> str | None:
    """What such machines need and somebody could provide here, or None."""
    if shutil.which("ip") is None:
        return "needs ip, from the package iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


@functools.cache
def missing() -> str | None:
    """Why there can be no such machines here, or None."""
    if (needed := can_be_had()) is not None:
        return needed
    name = f"probe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode != 0:
        return f"no network namespaces here: {done.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that reach each other, and nobody else."""
    tag = os.getpid() % 100_000
    machines = tuple(Machine(f"m{side}{tag}", f"v{side}{tag}", f"10.77.0.{side}") for side in (1, 2))
    first, second = machines
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
        _ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for machine in machines:
            _ip("link", "set", machine.interface, "netns", machine.name)
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            _ip("-n", machine.name, "link", "set", "lo", "up")
            _ip("-n", machine.name, "link", "set", machine.interface, "up")
        yield first, second
    finally:
        for machine in machines:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", machine.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
