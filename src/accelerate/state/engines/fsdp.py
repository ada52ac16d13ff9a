"""FSDP, of either version: asked for by its plugin, by the launch, or by an axis of the mesh."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from accelerate import devices
from accelerate.config.environment import parse_flag_from_env
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.errors import check_kind
from accelerate.state.engines.base import EngineSetup, Request

if TYPE_CHECKING:
    from accelerate.state.accelerator import AcceleratorState
    from accelerate.state.partial import PartialState

logger: logging.Logger = logging.getLogger(__name__)


class FSDPSetup(EngineSetup):
    """Each process holds a shard of every parameter."""

    name = "FSDP"
    axis = "dp_shard"

    def __init__(self, request: Request) -> None:
        plugin = request.plugin
        check_kind("fsdp_plugin", plugin, FullyShardedDataParallelPlugin)
        if plugin is None:
            launched = parse_flag_from_env("ACCELERATE_USE_FSDP") and "FSDP_VERSION" in os.environ
            version: Any = 2 if request.is_needed and not launched else None
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        if request.is_needed and plugin.fsdp_version != 2:
            raise ValueError(
                f"{request.mesh!r} needs FSDP version 2, but the plugin is for version {plugin.fsdp_version}: "
                "pass FullyShardedDataParallelPlugin(fsdp_version=2), or set FSDP_VERSION=2."
            )
        self._plugin = plugin
        self._mixed_precision = request.mixed_precision

    def plugins(self) -> dict[str, Any]:
        return {"fsdp_plugin": self._plugin}

    def before_process(self, cpu: bool) -> None:
        if self._mixed_precision != "no":
            self._plugin.set_mixed_precision(self._mixed_precision)
        devices.choose(os.environ, cpu).device.will_shard()

    def show(self, state: AcceleratorState) -> None:
        if _can_shard(state):
            os.environ["ACCELERATE_USE_FSDP"] = "true"  # libraries that load pretrained models look there
            state.fsdp_plugin = self._plugin
            state.distributed_type = state.device_kind.sharding_label

    @classmethod
    def check_second(cls, argument: str, plugin: Any, state: AcceleratorState) -> None:
        check_kind(argument, plugin, FullyShardedDataParallelPlugin)
        if _can_shard(state):
            super().check_second(argument, plugin, state)


def _can_shard(state: PartialState) -> bool:
    """Whether there is somebody to share a model with; says so where there is not."""
    if state.backend is None:
        _say_that_nothing_is_sharded()
    return state.backend is not None


@functools.cache  # one process stays one process, however often its states are set up
def _say_that_nothing_is_sharded() -> None:
    logger.warning(
        "FSDP has nothing to shard across, since there is only one process, so models stay unsharded: start several "
        "with `accelerate launch --num_processes`, or one GPU process with `torchrun`."
    )
