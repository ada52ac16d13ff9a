#!/bin/bash
# MPI: `bash examples/jobs/mpirun.sh`, from the folder that holds `examples`, on the first of the machines.
# The file named by HOSTS has a line such as `node-1 slots=4` for each machine; mpirun reaches them by ssh.
set -euo pipefail

HOSTS=${HOSTS:-hosts}
# mpirun tells its processes their ranks, and not where they meet.
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)} MASTER_PORT=${MASTER_PORT:-29500}

mpirun -n "${PROCESSES:-8}" --hostfile "$HOSTS" -x MASTER_ADDR -x MASTER_PORT \
    accelerate launch --mixed_precision bf16 examples/quickstart.py --epochs 2
