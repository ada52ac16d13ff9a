"""Who runs the processes: one file per engine, the first that matches is used."""

from __future__ import annotations

from accelerate.launch.engines import deepspeed, elastic, mpi, sagemaker, single, tpu
from accelerate.launch.plan import Engine

# The plain case is last: one process.
ENGINES: tuple[Engine, ...] = (
    sagemaker.ENGINE,
    tpu.ENGINE,
    mpi.ENGINE,
    deepspeed.ENGINE,
    elastic.ENGINE,
    single.ENGINE,
)
