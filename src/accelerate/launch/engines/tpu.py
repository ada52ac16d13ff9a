"""TPUs. Their settings are read and carried; starting them is not part of this version."""

from __future__ import annotations

from accelerate.launch.engines import single
from accelerate.launch.plan import Engine, LaunchPlan
from accelerate.launch.settings import Settings


def variables(mixed_precision: str, downcast_bf16: bool) -> dict[str, str]:
    """What XLA reads: which of Python's floats are bf16."""
    if mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16": "1"} if downcast_bf16 else {"XLA_USE_BF16": "1"}


def _plan(settings: Settings) -> LaunchPlan:
    env = {**single.environment(settings), **variables(settings.mixed_precision, bool(settings.downcast_bf16))}
    return LaunchPlan(
        "a TPU",
        single.command(settings),
        env,
        refused=("starting a run on a TPU", "start the script with the tools of torch_xla."),
    )


ENGINE = Engine(matches=lambda settings: bool(settings.tpu), plan=_plan)
