"""Variables for workers of other machines, in a file that DeepSpeed's launcher reads."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

# Names the file for DeepSpeed; without it, there may be one of this name in the home folder and in the working folder.
VARIABLE = "DS_ENV_FILE"
USUAL = ".deepspeed_env"

# What belongs to this machine, this login or this shell, and would be wrong elsewhere.
_HERE = re.compile(
    r"_|DISPLAY|HOSTNAME|LOGNAME|MAIL|OLDPWD|PWD|SHLVL|TERM|TMPDIR|(CUDA|HIP)_VISIBLE_DEVICES|"
    r"(DBUS|LC|LS|PMIX|PRTE|SSH|SUDO|TMUX|XDG)_.*"
)


@contextlib.contextmanager
def carried(ours: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Writes the file while the block runs; yields the variable that names it."""
    descriptor, path = tempfile.mkstemp(prefix="accelerate-", suffix=".env")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines(os.environ, ours))
        yield {VARIABLE: path}
    finally:
        os.unlink(path)


def lines(environ: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """`NAME=value` for each variable; of what is said twice, the last holds: this shell, DeepSpeed's files, ours."""
    shell = [
        f"{name}={value}"
        for name, value in environ.items()
        if name.isidentifier() and not _HERE.fullmatch(name) and re.fullmatch(r"[\w@%+=:,./-]+", value)
    ]
    name = environ.get(VARIABLE, USUAL)
    files = [Path(folder, name) for folder in (os.path.expanduser("~"), ".")]
    theirs = [line for file in dict.fromkeys(files) if file.is_file() for line in file.read_text().splitlines()]
    return [*shell, *(line for line in theirs if "=" in line), *(f"{name}={value}" for name, value in ours.items())]
