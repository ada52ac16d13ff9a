"""What a DeepSpeed config leaves as "auto", filled in from the objects of a script."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.config.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accelerate.errors import warn

_MICRO = "train_micro_batch_size_per_gpu"
_TOTAL = "train_batch_size"
_STEPS = "gradient_accumulation_steps"
# What depends on how wide a model is: how many elements, of its hidden size.
_BY_WIDTH = {
    "zero_optimization.reduce_bucket_size": lambda width: width * width,
    "zero_optimization.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "zero_optimization.stage3_param_persistence_threshold": lambda width: 10 * width,
}


@dataclass
class Objects:
    """What becomes one engine, and what is known of the run.

    batch_sizes: those of the script's loaders, for one process. processes: how many have other data.
    """

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    batch_sizes: list[int | None]
    processes: int
    split_batches: bool
    accumulation_steps: int


def fill(plugin: DeepSpeedPlugin, objects: Objects) -> None:
    """Fill in all that the plugin's config leaves open. What is missing or cannot be is one error, before that."""
    wrong = _roles(plugin, objects.optimizer, objects.scheduler)
    skipped = ("optimizer", "scheduler") if wrong else ()
    values: dict[str, Any] = {"gradient_clipping": 1.0}
    values["zero_optimization.stage3_gather_16bit_weights_on_model_save"] = False
    steps = plugin.get_value(_STEPS)
    values[_STEPS] = steps = objects.accumulation_steps if steps == "auto" else steps
    micro = _micro_batch(plugin, objects, wrong)
    if micro is not None:
        values[_MICRO] = micro
        values[_TOTAL] = micro * steps * objects.processes
        _check_total(plugin, values, objects.processes, wrong)
    values |= _by_width(plugin, objects.model, wrong)
    values |= _of_stand_ins(objects)
    wrong += _unfilled(plugin, values, skipped)
    if wrong:
        raise ValueError(
            "The DeepSpeed config and the objects given to `prepare` do not fit together:\n"
            + "\n".join(f"- {sentence}" for sentence in wrong)
        )
    left_open = _autos(plugin.deepspeed_config)
    plugin.deepspeed_config_process(must_match=False, **values)
    plugin.filled |= {key: plugin.get_value(key) for key in left_open}
    if isinstance(objects.optimizer, torch.optim.Optimizer):
        plugin.deepspeed_config["zero_allow_untested_optimizer"] = True


def open_again(plugin: DeepSpeedPlugin) -> None:
    """Make "auto" again what an engine before has filled in, unless the script has written something else since."""
    for key, value in plugin.filled.items():
        node, last = plugin.hf_ds_config.find_config_node(key)
        if node is not None and node.get(last) == value:
            node[last] = "auto"
    plugin.filled.clear()


def _roles(plugin: DeepSpeedPlugin, optimizer: Any, scheduler: Any) -> list[str]:
    """Whether optimizer and scheduler are each made in one place: by the config, or by the script."""
    wrong = []
    config = plugin.deepspeed_config
    if isinstance(optimizer, DummyOptim) and "optimizer" not in config:
        wrong.append("the script has a DummyOptim, but the config has no 'optimizer' that it stands for")
    if isinstance(optimizer, torch.optim.Optimizer) and "optimizer" in config:
        kind = type(optimizer).__name__
        wrong.append(
            f"'optimizer' is in the config, but the script has created {kind}: create a DummyOptim, or remove it"
        )
    if isinstance(scheduler, DummyScheduler):
        if "scheduler" not in config and scheduler.lr_scheduler_callable is None:
            wrong.append("the script has a DummyScheduler, but the config has no 'scheduler' that it stands for")
    elif scheduler is not None:
        kind = type(scheduler).__name__
        if "scheduler" in config:
            wrong.append(
                f"'scheduler' is in the config, but the script has created a {kind}: create a DummyScheduler, "
                "or remove it"
            )
        if isinstance(optimizer, DummyOptim):
            wrong.append(f"the script has created a {kind} for a DummyOptim, which needs a DummyScheduler")
    return wrong


def _micro_batch(plugin: DeepSpeedPlugin, objects: Objects, wrong: list[str]) -> int | None:
    """How many samples a process takes at once: as the config says, else as the loaders do."""
    sizes = objects.batch_sizes
    if objects.split_batches:
        sizes = [size if size is None else size // objects.processes for size in sizes]
    said = plugin.get_value(_MICRO)
    if said not in (None, "auto"):
        if sizes and said not in sizes and None not in sizes:
            warn(
                f"The DeepSpeed config says {_MICRO}={said}, but the loaders have batches of {sizes}: the "
                "loaders take precedence."
            )
        return int(said)
    if said is None and plugin.get_value(_TOTAL) != "auto":
        return None  # DeepSpeed divides the total
    if objects.optimizer is None:
        return 1  # a model that is not trained
    if not sizes:
        wrong.append(f"{_MICRO} is 'auto', but no loader was prepared to take it from: pass one, or write a number")
    elif None in sizes:
        wrong.append(f"{_MICRO} is 'auto', but a loader has batches of no fixed size: write a number")
    else:
        known = [size for size in sizes if size is not None]
        return min(known) if plugin.is_train_batch_min else max(known)
    return None


def _check_total(plugin: DeepSpeedPlugin, values: dict[str, Any], processes: int, wrong: list[str]) -> None:
    said = plugin.get_value(_TOTAL)
    if said not in (None, "auto", values[_TOTAL]):
        wrong.append(
            f"{_TOTAL} is {said} in the config, but {values[_MICRO]} samples x {values[_STEPS]} accumulation steps "
            f"x {processes} processes are {values[_TOTAL]}"
        )


def _by_width(plugin: DeepSpeedPlugin, model: torch.nn.Module, wrong: list[str]) -> dict[str, int]:
    asked = [key for key in _BY_WIDTH if plugin.is_auto(key)]
    if not asked:
        return {}
    config: Any = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0])
    if not width:
        kind = type(model).__name__
        wrong.append(
            f"{', '.join(asked)} is 'auto', but {kind} has neither `config.hidden_size` nor `config.hidden_sizes`: "
            "write a number"
        )
        return {}
    return {key: _BY_WIDTH[key](width) for key in asked}


def _of_stand_ins(objects: Objects) -> dict[str, Any]:
    values: dict[str, Any] = {}
    optimizer, scheduler = objects.optimizer, objects.scheduler
    if isinstance(optimizer, DummyOptim):
        values["optimizer.params.lr"] = optimizer.lr
        values["optimizer.params.weight_decay"] = optimizer.weight_decay
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
        of = scheduler.optimizer
        values["scheduler.params.warmup_min_lr"] = 0
        values["scheduler.params.warmup_max_lr"] = of.lr if isinstance(of, DummyOptim) else of.defaults["lr"]
        # DeepSpeed refuses 0.
        values["scheduler.params.warmup_num_steps"] = max(1, scheduler.warmup_num_steps)
        if scheduler.total_num_steps is not None:
            shares = 1 if objects.split_batches else objects.processes
            values["scheduler.params.total_num_steps"] = math.ceil(scheduler.total_num_steps / shares)
    return values


def _unfilled(plugin: DeepSpeedPlugin, values: dict[str, Any], skipped: tuple[str, ...]) -> list[str]:
    """What stays "auto", other than what was said to be wrong already. skipped: parts of the config that were."""
    said = {_MICRO, _TOTAL, *_BY_WIDTH}
    config = dict(plugin.deepspeed_config)
    for part in skipped:
        config.pop(part, None)
    return [
        f"{key} is 'auto', but there is nothing to take it from: write a value"
        for key in _autos(config)
        if key not in values and key not in said
    ]


def _autos(config: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in config.items():
        if isinstance(value, dict):
            found += _autos(value, f"{prefix}{name}.")
        elif value == "auto":
            found.append(prefix + name)
    return found
