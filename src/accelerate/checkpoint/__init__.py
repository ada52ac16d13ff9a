"""Checkpoints of a run: written completely or not at all, and read without running any code in them."""
