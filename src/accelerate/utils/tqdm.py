"""The progress bar, under its public path."""

from accelerate.tqdm import tqdm

__all__ = ["tqdm"]
