"""TPUs: one process on one chip. Several chips are planned and shown; starting them is not part of this version."""

from __future__ import annotations

from accelerate.available import is_torch_xla_available
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
    command = single.command(settings)
    if settings.num_processes > 1 or settings.num_machines > 1 or settings.tpu_use_cluster:
        remedy = "pass `--num_processes 1` for one chip, or start the script with the tools of torch_xla."
        return LaunchPlan("a TPU", command, env, refused=("starting a run on several chips of a TPU", remedy))
    missing = (
        "" if is_torch_xla_available() else "`--tpu` needs torch_xla: install the release that matches your torch."
    )
    # Without a TPU the script then says so, instead of training on the CPU.
    return LaunchPlan("a TPU", command, {**env, "ACCELERATE_TORCH_DEVICE": "xla"}, missing=missing)


ENGINE = Engine(matches=lambda settings: bool(settings.tpu), plan=_plan)
