"""Run a test function on several real processes: `run_world(function, processes=2)`."""

from tests.harness.world import Outcome, WorldFailed, run_world, world_outcomes

__all__ = ["Outcome", "WorldFailed", "run_world", "world_outcomes"]
