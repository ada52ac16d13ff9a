"""What keeps DeepSpeed from training a model here, said before its engine is made."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.engines.deepspeed import need_operation
from accelerate.errors import warn

# The optimizers of a config that ZeRO takes without being told to.
_TESTED = ("adam", "adamw", "adagrad", "lion", "muon")
# The stages of ZeRO that keep a part off the device.
_OFFLOADED_IN = {"optimizer": (1, 2, 3), "param": (3,)}
# What DeepSpeed compiles for optimizers of a config: those on the host, and the others.
_ON_HOST = {"adam": "CPUAdam", "adamw": "CPUAdam", "adagrad": "CPUAdagrad", "lion": "CPULion"}
_ON_DEVICE = {"adam": "FusedAdam", "adamw": "FusedAdam", "lamb": "FusedLamb", "lion": "FusedLion"}


def check_disk(plugin: DeepSpeedPlugin, model: nn.Module) -> None:
    parts = ("offload_optimizer", "offload_param")
    on_disk = [part for part in parts if plugin.get_value(f"zero_optimization.{part}.device") == "nvme"]
    if not on_disk:
        return
    for part in on_disk:
        if plugin.get_value(f"zero_optimization.{part}.nvme_path") in (None, "", "none"):
            raise ValueError(
                f"{part} is set to a disk, but the DeepSpeed config has no folder for it: set `{part}_nvme_path` of "
                f"the plugin, or zero_optimization.{part}.nvme_path in the config."
            )
        stage = plugin.get_value("zero_optimization.stage")
        if stage != 3:
            raise ValueError(
                f"DeepSpeed would keep {part} in memory, not on a disk, in stage {stage} of ZeRO: use stage 3, or "
                "offload to 'cpu'."
            )
    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        raise ImportError(
            "Offloading to a disk needs DeepSpeed's async_io, which cannot be compiled here: install the libaio "
            "library with its headers (libaio-dev), or offload to 'cpu'."
        )
    whole = plugin.mixed_precision == "no" and any(p.dtype == torch.float32 for p in model.parameters())
    if "offload_param" in on_disk and whole and not get_accelerator().is_fp16_supported():
        raise ValueError(
            f"DeepSpeed would round parameters on a disk to bf16 on this {get_accelerator().device_name()}: use "
            "mixed_precision='bf16', which keeps them in fp32 too, or offload them to 'cpu'."
        )


def check_exchange() -> None:
    """On CPU, DeepSpeed compiles how processes exchange tensors, where it can."""
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME):
        need_operation("ShareMemCommBuilder", "Training on a CPU")


def is_offloaded(plugin: DeepSpeedPlugin, part: str = "optimizer") -> bool:
    """Whether the optimizer, and its steps, or the parameters ("param") are off the device."""
    asked = plugin.get_value(f"zero_optimization.offload_{part}.device") not in (None, "none")
    return asked and plugin.get_value("zero_optimization.stage") in _OFFLOADED_IN[part]


def drop_what_stays(config: dict[str, Any]) -> None:
    """Take out of a config what is to be offloaded and is not in its stage of ZeRO, where DeepSpeed says no word."""
    zero = config["zero_optimization"]
    stage = zero.get("stage", 0)
    for part, stages in _OFFLOADED_IN.items():
        asked = (zero.get(f"offload_{part}") or {}).get("device") not in (None, "none")
        if asked and stage not in stages:
            del zero[f"offload_{part}"]
            warn(
                f"DeepSpeed has offload_{part} for stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} of "
                f"ZeRO, but this is stage {stage}: nothing is offloaded."
            )


def check_trainable(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"None of the parameters that this {type(optimizer).__name__} trains needs a gradient, so DeepSpeed has "
            f"nothing to train: prepare the {type(model).__name__} without an optimizer, or unfreeze some of them."
        )


def check_optimizer(plugin: DeepSpeedPlugin) -> None:
    """Whether DeepSpeed can make the optimizer that its config describes, and takes it."""
    kind = str(plugin.get_value("optimizer.type"))
    name = kind.lower()
    if name not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, kind):
        raise ValueError(
            f"The DeepSpeed config asks for an optimizer {kind!r}, which neither DeepSpeed nor torch.optim has: "
            "write the name of one of theirs, such as 'AdamW'."
        )
    sharded = bool(plugin.get_value("zero_optimization.stage"))
    if sharded and name not in _TESTED and not plugin.get_value("zero_allow_untested_optimizer"):
        raise ValueError(
            f"DeepSpeed does not vouch for ZeRO with the optimizer {kind!r} of its config: write "
            "zero_allow_untested_optimizer=true into the config, or choose 'AdamW'."
        )
    operation = (_ON_HOST if is_offloaded(plugin) else _ON_DEVICE).get(name)
    if operation is not None and not plugin.get_value("optimizer.params.torch_adam"):
        instead = ", or write torch_adam=true into the params of an Adam, to have torch's own"
        need_operation(f"{operation}Builder", "The optimizer of the DeepSpeed config", instead)


def leave_states(optimizer: torch.optim.Optimizer) -> None:
    """Say that what an optimizer has learned is lost, and forget it: DeepSpeed cannot save states of parameters that
    are gone. Some optimizers have states from the start, of no step."""
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        warn(
            f"The states of this {type(optimizer).__name__} are dropped, because DeepSpeed creates its own for "
            "shards of the parameters: prepare an optimizer without any, and load a checkpoint with `load_state`."
        )
        optimizer.state.clear()
