"""DeepSpeed: one plugin, or several by name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accelerate.available import is_deepspeed_available
from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.config.enums import DistributedType
from accelerate.errors import NotYetSupported, a_kind_of
from accelerate.state.engines.base import EngineSetup, Request, import_engine, join_a_group, set_world_variables
from accelerate.versions import compare_versions

if TYPE_CHECKING:
    from accelerate.state.accelerator import AcceleratorState
    from accelerate.state.partial import PartialState

OLDEST_DEEPSPEED = "0.16.4"


class DeepSpeedSetup(EngineSetup):
    """Models, optimizers and schedulers become DeepSpeed's engines."""

    name = "DeepSpeed"
    cuts_sequences = True

    def __init__(self, request: Request) -> None:
        given = DeepSpeedPlugin() if request.plugin is None else request.plugin
        plugins: dict[str, Any] = given if isinstance(given, dict) else {"default": given}
        for name, plugin in plugins.items():
            if not isinstance(plugin, DeepSpeedPlugin):
                which = f"deepspeed_plugins[{name!r}]" if isinstance(given, dict) else "deepspeed_plugin"
                raise TypeError(f"{which} is {a_kind_of(plugin)}: pass a DeepSpeedPlugin.")
            if plugin.hf_ds_config.is_true("msamp.enabled"):
                raise NotYetSupported("MS-AMP with DeepSpeed (`enable_msamp`)", "leave it out, and use 'bf16'.")
        if not plugins:
            raise ValueError("deepspeed_plugins is an empty dict: give each DeepSpeedPlugin a name in it.")
        if request.mixed_precision == "fp8":
            raise NotYetSupported("mixed_precision='fp8' with DeepSpeed", "use 'bf16', or FSDP to spread the model.")
        if not is_deepspeed_available():
            raise ImportError("DeepSpeed was requested but is not installed: pip install deepspeed")
        if compare_versions("deepspeed", "<", OLDEST_DEEPSPEED):
            raise ImportError(
                f"The installed DeepSpeed is older than {OLDEST_DEEPSPEED}, the first release for the versions of "
                "torch that this package supports: pip install --upgrade deepspeed"
            )
        for plugin in plugins.values():
            plugin.set_mixed_precision(request.mixed_precision)
        self._plugins = plugins

    def set_up(self, partial: PartialState) -> None:
        os.environ.setdefault("DS_ACCELERATOR", partial.device.type)
        import_engine("deepspeed.accelerator", "DeepSpeed")
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # libraries that load pretrained models look there
        set_world_variables(partial)  # which DeepSpeed reads
        join_a_group(partial)

    def show(self, state: AcceleratorState) -> None:
        state.deepspeed_plugins = self._plugins
        state.distributed_type = DistributedType.DEEPSPEED
        state.select_deepspeed_plugin(next(iter(self._plugins)))

    @classmethod
    def check_second(cls, argument: str, plugin: Any, state: AcceleratorState) -> None:
        """A second Accelerator has the plugins of the first, with what has been filled in since."""
        known = list((state.deepspeed_plugins or {}).values())
        given = list(plugin.values()) if isinstance(plugin, dict) else [plugin]
        if not given or not all(any(one is other for other in known) for one in given):
            raise NotImplementedError(
                "The first `Accelerator()` of this process has set its DeepSpeed plugins, or none: pass all of "
                "them to that one, by name, and choose with `state.select_deepspeed_plugin(name)`."
            )
