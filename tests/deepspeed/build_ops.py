"""Compile what DeepSpeed compiles at its first use on a CPU, once for the environment: no test waits for it then."""

from __future__ import annotations

from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

for builder in (ShareMemCommBuilder(), CPUAdamBuilder()):
    if builder.is_compatible(verbose=False):
        builder.load(verbose=False)
        print(f"{builder.name}: built")
    else:
        print(f"{builder.name}: not possible here")
