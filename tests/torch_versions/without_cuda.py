"""Make a CUDA build of torch importable where there is no CUDA: `PYTHON without_cuda.py`, with PYTHON's torch.

Releases before the current one are on the package index as CUDA builds, which need gigabytes of libraries even to be
imported. One library takes the place of all that are missing: it has each function that torch asks for, under the
version that torch asks for, and every one of them answers that there is no device. What is left is torch on the CPU.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

STAND_IN = "libno_cuda.so"
NO_DEVICE = 100  # what both the runtime and the driver of CUDA call this
# Libraries and functions of CUDA and what comes with it: cuDNN, NCCL, NVSHMEM and the like.
LIBRARIES = ("libcu", "libnccl", "libnv")
FUNCTIONS = ("cu", "nccl", "nv")
# Versions of what every system has: the libraries of C, C++ and OpenMP.
OF_THE_SYSTEM = ("GLIBC", "CXXABI", "GCC", "GOMP", "OMP")


def main() -> None:
    if _imports():
        return
    missing_tools = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing_tools:
        sys.exit(f"A stand-in for the CUDA libraries needs {', '.join(missing_tools)}: install gcc and binutils.")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit(f"{sys.executable} has no torch: install one with `pip install --no-deps`.")
    folder = Path(torch.origin).parent / "lib"
    libraries = sorted(folder.glob("*.so*"))
    _build(folder / STAND_IN, _functions(libraries))
    for name in _missing(libraries):
        (folder / name).symlink_to(STAND_IN)
    if not _imports():
        subprocess.run([sys.executable, "-c", "import torch"])
        sys.exit("torch cannot be imported with a stand-in for the CUDA libraries either: see the error above.")


def _imports() -> bool:
    return subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0


def _missing(libraries: list[Path]) -> list[str]:
    """The libraries of CUDA that torch's need."""
    lines = _output("readelf", "--dynamic", "--wide", *libraries)
    there = {path.name for path in libraries}
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", lines))
    return sorted(name for name in needed if name.startswith(LIBRARIES) and name not in there)


def _functions(libraries: list[Path]) -> dict[str, str | None]:
    """The functions of CUDA that torch's libraries ask others for, each with its version, if it has one."""
    found: dict[str, str | None] = {}
    for line in _output("nm", "--dynamic", "--undefined-only", *libraries).splitlines():
        name, _, version = (line.split() or [""])[-1].partition("@")
        if version and not version.startswith(OF_THE_SYSTEM):
            found[name] = version
        elif not version and name.startswith(FUNCTIONS):
            found.setdefault(name, None)
    return found


def _build(target: Path, functions: dict[str, str | None]) -> None:
    versions: dict[str, list[str]] = {}
    for name, version in functions.items():
        if version is not None:
            versions.setdefault(version, []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stand_in.c"), Path(folder, "stand_in.map")
        source.write_text("\n".join(_definition(name) for name in functions))
        script.write_text("".join(f"{version} {{ {'; '.join(names)}; }};\n" for version, names in versions.items()))
        # Without -w and -fno-builtin gcc compares some of them with functions of the same name that it knows.
        flags = ["-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,--version-script={script}"]
        subprocess.run(["gcc", *flags, "-o", target, source], check=True)


def _definition(name: str) -> str:
    if name.endswith(("String", "Name")):  # of an error
        return f'const char *{name}(void) {{ return "there is no CUDA"; }}'
    return f"long {name}(void) {{ return {NO_DEVICE}; }}"


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
