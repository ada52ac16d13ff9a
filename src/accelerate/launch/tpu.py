"""What a machine with a TPU is told about itself: how many chips it has, and which machine of a pod it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from accelerate.environments.base import integer
from accelerate.launch.machine import Accelerators
from accelerate.launch.settings import Settings

_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# v2 and v3, v4, v5e, v5p, v6e, v7x; Google makes network cards, too.
_CHIPS = ("0x0027", "0x005e", "0x0063", "0x0062", "0x006f", "0x0076")
_METADATA = "http://{}/computeMetadata/v1/instance/attributes/{}"


class Pod(NamedTuple):
    """The machines of a pod by their addresses, which of them this one is, and how that is known."""

    addresses: list[str]
    number: int
    reason: str


def chips(bus: Path = _PCI) -> int:
    """How many chips this machine has."""

    def of(path: Path, name: str) -> str:
        try:
            return (path / name).read_text().strip()
        except OSError:
            return ""

    devices = list(bus.iterdir()) if bus.is_dir() else []
    return sum(of(path, "vendor") == _GOOGLE and of(path, "device") in _CHIPS for path in devices)


def pod(environ: Mapping[str, str], found: int) -> Pod | None:
    """The pod that this machine, with so many chips, is part of: by variables, or by what Google Cloud says."""
    names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    own = integer(environ, ["TPU_WORKER_ID"])
    if names and own is not None:
        if own not in range(len(names)):
            raise ValueError(
                f"The environment variable TPU_WORKER_ID is {own}, but TPU_WORKER_HOSTNAMES names {len(names)} "
                "machines, which are counted from 0: correct one of the two."
            )
        reason = "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID say so"
        return Pod(names, own, reason) if len(names) > 1 else None
    if not found:
        return None  # and nobody to ask
    endpoints, number = _asked(environ, "worker-network-endpoints"), _asked(environ, "agent-worker-number")
    addresses = [entry.split(":")[-1] for entry in (endpoints or "").split(",") if entry]
    if len(addresses) < 2 or number is None or not number.isdigit():
        return None
    return Pod(addresses, int(number), "Google Cloud's metadata says so")


def _asked(environ: Mapping[str, str], attribute: str) -> str | None:
    from urllib.request import Request, urlopen

    host = environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = Request(_METADATA.format(host, attribute), headers={"Metadata-Flavor": "Google"})
    try:
        with urlopen(request, timeout=3) as answer:
            text: str = answer.read().decode().strip()
            return text
    except OSError:  # a machine elsewhere
        return None


def settle(settings: Settings, environ: Mapping[str, str]) -> None:
    """What `--tpu` means on this machine: a process for each chip, or one for all where a model is sharded."""
    if settings.tpu_use_cluster:
        return  # each machine of the pod finds out for itself
    found = chips()
    settings.devices = Accelerators("TPU", found, f"{found} TPU chips on the PCI bus")
    explicit = settings.of["num_machines"].source == "flag" or settings.of["machine_rank"].source == "flag"
    machines = None if explicit or settings.nnodes is not None else pod(environ, found)
    if machines is not None:
        settings.put("num_machines", len(machines.addresses), "detected", machines.reason)
        settings.put("machine_rank", machines.number, "detected", machines.reason)
        if settings.main_process_ip is None:
            settings.put("main_process_ip", machines.addresses[0], "detected", "the first machine of the pod")
    if settings.use_fsdp and settings.num_processes is None:
        settings.put("num_processes", settings.num_machines or 1, "detected", "one shards models over all chips")


def check(settings: Settings) -> None:
    """Refuses processes that do not fit the chips: torch_xla would wait for those that are missing."""
    found, here = settings.devices.count, settings.local_processes
    if settings.use_fsdp and settings.num_processes > 1:
        raise ValueError(
            f"FSDP on a TPU uses one process for all chips of one machine, not {settings.num_processes}: pass "
            "`--num_processes 1`, on one machine, or leave out `--use_fsdp`."
        )
    if found and here not in ((1, found) if settings.num_machines == 1 else (found,)):
        most = f"{found} on each of {settings.num_machines} machines" if settings.num_machines > 1 else f"1 or {found}"
        raise ValueError(
            f"This TPU has {found} chips on each machine, but {here} processes were requested on each: it takes "
            f"{most}; leave out `--num_processes` to have one for each chip."
        )
