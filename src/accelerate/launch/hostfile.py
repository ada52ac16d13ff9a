"""The machines that DeepSpeed's own launchers start: a hostfile, and what a filter leaves of it."""

from __future__ import annotations

import re
from pathlib import Path

# Where DeepSpeed looks when nobody names a file.
USUAL = "/job/hostfile"

# Each machine with the numbers of its slots, which are its devices.
Hosts = dict[str, list[int]]


def read(path: str) -> Hosts:
    """The machines of a hostfile: a line each, `name slots=4`; lines that begin with `#` are left out."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FileNotFoundError(
            f"The hostfile {path} cannot be read ({error.strerror}): give one that lists the machines with "
            "`--deepspeed_hostfile`, a line each, such as `worker-1 slots=4`."
        ) from None
    hosts: Hosts = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        found = re.match(r"(\S+)\s+slots=(\d+)(\s|$)", line)
        if found is None:
            raise ValueError(
                f"Line {number} of the hostfile {path} reads {line!r}: write the name of a machine and how many "
                "devices it has, such as `worker-1 slots=4`."
            )
        if found[1] in hosts:
            raise ValueError(f"The hostfile {path} lists {found[1]} twice: keep one of the lines.")
        hosts[found[1]] = list(range(int(found[2])))
    if not hosts:
        raise ValueError(f"The hostfile {path} lists no machine: write a line for each, such as `worker-1 slots=4`.")
    return hosts


def included(hosts: Hosts, words: str) -> Hosts:
    """The machines and slots that a filter such as `worker-1@worker-2:0,2` names, in the order of the hostfile."""
    named = _named(hosts, words, "`--deepspeed_inclusion_filter`")
    return {name: sorted(named[name]) for name in hosts if name in named}


def without(hosts: Hosts, words: str) -> Hosts:
    """The machines and slots that such a filter does not name."""
    named = _named(hosts, words, "`--deepspeed_exclusion_filter`")
    left = {name: [slot for slot in slots if slot not in named.get(name, ())] for name, slots in hosts.items()}
    left = {name: slots for name, slots in left.items() if slots}
    if not left:
        raise ValueError(f"`--deepspeed_exclusion_filter` {words!r} leaves no machine of the hostfile.")
    return left


def _named(hosts: Hosts, words: str, flag: str) -> dict[str, set[int]]:
    named: dict[str, set[int]] = {}
    for part in words.split("@"):
        name, colon, numbers = part.partition(":")
        if name not in hosts:
            raise ValueError(f"{flag} names {name!r}, which the hostfile does not list: it has {', '.join(hosts)}.")
        try:
            slots = {int(number) for number in numbers.split(",")} if colon else set(hosts[name])
        except ValueError:
            raise ValueError(f"{flag} reads {part!r}: after the colon come numbers of slots, such as `:0,2`.") from None
        if unknown := sorted(slots - set(hosts[name])):
            raise ValueError(f"{flag} names slot {unknown[0]} of {name}, whose {len(hosts[name])} slots count from 0.")
        named.setdefault(name, set()).update(slots)
    return named
