"""Which objects of a script become one engine of DeepSpeed, and what it is given: all of it before any is made."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

from deepspeed.runtime import lr_schedules
from torch import nn

from accelerate.bundle import Bundle, Entry
from accelerate.config.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accelerate.engines.deepspeed import map_pytorch_optim_to_deepspeed
from accelerate.strategies import deepspeed_checks as checks
from accelerate.strategies.deepspeed_settings import Objects, fill, open_again


@dataclass(eq=False)
class Plan:
    """One engine that is to be made, or a model that needs none."""

    model: Entry
    # None for a model that is not trained.
    optimizer: Entry | None
    scheduler: Entry | None
    # For `deepspeed.initialize`.
    arguments: dict[str, Any] = field(default_factory=dict)
    # The norm that the config says to clip at, None where it leaves that to the script.
    fixed_clip: float | None = None

    @property
    def given(self) -> Any:
        """The script's optimizer, or what stands for one."""
        return None if self.optimizer is None else self.optimizer.value

    @property
    def schedule(self) -> Any:
        """The script's scheduler, or what stands for one."""
        return None if self.scheduler is None else self.scheduler.value


def plans(bundle: Bundle) -> list[Plan]:
    """Each model that was given to `prepare`, with its optimizer and its scheduler."""
    models = [model for model in bundle.models if not model.evaluation]
    left = list(bundle.optimizers)
    belong = len(models) == len(left) == 1  # whatever parameters the optimizer has
    found = []
    for model in models:
        own = left if belong else [entry for entry in left if _trains(entry.value, model.value)]
        if len(own) > 1:
            raise ValueError(
                f"This {type(model.value).__name__} has {len(own)} optimizers, but DeepSpeed steps one for each "
                "model: give one optimizer several groups of parameters."
            )
        optimizer = own[0] if own else None
        left = [entry for entry in left if entry is not optimizer]
        found.append(Plan(model, optimizer, None if optimizer is None else _scheduler_of(optimizer, bundle)))
    if left:
        raise ValueError(
            f"DeepSpeed makes one engine of a model and its optimizer, but {type(left[0].value).__name__} came "
            "without its model: pass both to one call of `prepare`."
        )
    return found


def settle(plan: Plan, plugin: DeepSpeedPlugin, **run: Any) -> None:
    """Find out what an engine is given. Raises where it could not be made. run: what `Objects` knows of it."""
    model, given, schedule = plan.model.value, plan.given, plan.schedule
    checks.check_disk(plugin, model)
    checks.check_exchange()
    if given is not None:  # else what the config has of a training before stays
        open_again(plugin)
    plan.fixed_clip = None if plugin.is_auto("gradient_clipping") else plugin.get_value("gradient_clipping") or None
    fill(plugin, Objects(model, given, schedule, **run))
    plugin.set_moe_leaf_modules(model)
    plan.arguments = {"model": model, "config": _for_engine(plugin)}
    if isinstance(given, DummyOptim):
        checks.check_optimizer(plugin)
        plan.arguments["model_parameters"] = given.params
    elif given is not None:
        checks.check_trainable(given, model)
        on_host = checks.is_offloaded(plugin) and plugin.get_value("zero_force_ds_cpu_optimizer", True)
        plan.arguments["optimizer"] = map_pytorch_optim_to_deepspeed(given) if on_host else given
    if isinstance(schedule, DummyScheduler):
        if schedule.lr_scheduler_callable is not None:
            plan.arguments["lr_scheduler"] = schedule.lr_scheduler_callable
    elif type(schedule).__name__ in lr_schedules.VALID_LR_SCHEDULES:
        plan.arguments["lr_scheduler"] = schedule


def _for_engine(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """The config that an engine gets, which may change it."""
    config = copy.deepcopy(plugin.deepspeed_config)
    checks.drop_what_stays(config)
    # To measure how fast it trains, DeepSpeed has the host wait for the device twice in each step: not where nothing
    # would ever be printed of it. With offload the host waits for the device anyway.
    printed = config.get("steps_per_print") not in (None, math.inf)
    if not printed and not checks.is_offloaded(plugin) and not checks.is_offloaded(plugin, "param"):
        config.setdefault("timers", {"throughput": {"enabled": False}})
    return config


def _scheduler_of(optimizer: Entry, bundle: Bundle) -> Entry | None:
    """The scheduler of an optimizer, before the engine has changed both."""
    if len(bundle.optimizers) == 1:
        return bundle.schedulers[0] if bundle.schedulers else None
    return next((entry for entry in bundle.schedulers if entry.value.optimizer is optimizer.value), None)


def _trains(optimizer: Any, model: nn.Module) -> bool:
    """Whether an optimizer, or what stands for one, has parameters of a model."""
    own = set(map(id, model.parameters()))
    given = list(optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups)
    tensors = [p for group in given for p in (group["params"] if isinstance(group, dict) else [group])]
    return any(id(p) in own for p in tensors)
