"""Megatron-LM, on megatron-core."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accelerate import devices
from accelerate.available import has_package
from accelerate.config.enums import DistributedType
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.errors import NotYetSupported, Unfit, check_kind
from accelerate.state.engines.base import EngineSetup, Request, import_engine, join_a_group
from accelerate.versions import compare_versions

if TYPE_CHECKING:
    from accelerate.state.accelerator import AcceleratorState
    from accelerate.state.partial import PartialState

OLDEST_MEGATRON = "0.16.0"


class MegatronSetup(EngineSetup):
    """Layers and stages of a model are divided among processes."""

    name = "Megatron-LM"
    takes_mesh = False

    def __init__(self, request: Request) -> None:
        plugin = request.plugin
        check_kind("megatron_lm_plugin", plugin, MegatronLMPlugin)
        if request.mixed_precision == "fp8":
            raise NotYetSupported("mixed_precision='fp8' with Megatron-LM", "use 'bf16', or FSDP to spread the model.")
        if not has_package("megatron.core"):
            raise ImportError("Megatron-LM was requested but is not installed: pip install megatron-core")
        if compare_versions("megatron-core", "<", OLDEST_MEGATRON):
            raise ImportError(
                f"The installed megatron-core is older than {OLDEST_MEGATRON}, whose way of creating optimizers is "
                "used here: pip install --upgrade megatron-core"
            )
        self._plugin = MegatronLMPlugin() if plugin is None else plugin
        self._plugin.set_mixed_precision(request.mixed_precision)

    def plugins(self) -> dict[str, Any]:
        return {"megatron_lm_plugin": self._plugin}

    def set_up(self, partial: PartialState) -> None:
        import_engine("megatron.core", "megatron-core")
        cuda = devices.by_name("cuda")
        if cuda.count() == 0 or (cuda.available() and partial.device.type != cuda.name):
            raise Unfit(
                f"Megatron-LM runs on GPUs that are devices of `torch.cuda`, but rank {partial.process_index} is on "
                f"{partial.device}: start it on such GPUs, or spread the model with FSDP (`fsdp_plugin`)."
            )
        os.environ["ACCELERATE_USE_MEGATRON_LM"] = "true"  # where scripts ask whether it is the engine
        join_a_group(partial)

    def show(self, state: AcceleratorState) -> None:
        state.megatron_lm_plugin = self._plugin
        state.distributed_type = DistributedType.MEGATRON_LM
