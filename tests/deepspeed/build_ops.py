"""Compile what DeepSpeed compiles at its first use on a CPU, once for the environment: no test waits for it then.

Every file of DeepSpeed's reads all of torch's C++ headers, and its debug symbols are larger than its code. Here the
compiler reads the headers of tensors and Python alone, and leaves the symbols out, in half of the time. ninja compares
commands, which stay the same, and headers that are not the system's: so it takes what is built here for its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, ShareMemCommBuilder

HEADER = "#pragma once\n#include <torch/types.h>\n#include <torch/csrc/utils/pybind.h>\n"
BUILDERS = (ShareMemCommBuilder(), CPUAdamBuilder(), AsyncIOBuilder())


def build(folder: Path) -> None:
    """folder: for a compiler that comes before the system's."""
    Path(folder, "torch").mkdir()
    Path(folder, "torch", "extension.h").write_text(HEADER)
    compiler = Path(folder, "c++")
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} -isystem {folder} "$@" -g0\n')
    compiler.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
        lock.unlink()  # of a build that was killed: everyone would wait for its end
    for builder in BUILDERS:
        if builder.is_compatible(verbose=False):
            builder.load(verbose=False)
            print(f"{builder.name}: built")
        else:
            print(f"{builder.name}: not possible here")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
