"""Who runs the processes: one file per engine, the first that matches is used."""

from __future__ import annotations

from accelerate.launch.engines import deepspeed, elastic, mpi, sagemaker, single, tpu
from accelerate.launch.plan import LaunchEngine

# The plain case is last: one process.
ENGINES: tuple[LaunchEngine, ...] = (
    sagemaker.ENGINE,
    tpu.ENGINE,
    mpi.ENGINE,
    deepspeed.ENGINE,
    elastic.ENGINE,
    single.ENGINE,
)
