"""Random number generators, under their public path."""

from accelerate.constants import CUDA_DISTRIBUTED_TYPES
from accelerate.random import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = [
    "CUDA_DISTRIBUTED_TYPES",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
