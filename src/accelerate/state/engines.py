"""Which engine was asked for: by arguments, by the launcher's variables, or by one of them for the other."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from accelerate import devices
from accelerate.available import has_package, is_deepspeed_available
from accelerate.comm.torch_dist import join_alone
from accelerate.config.dynamo import TorchDynamoPlugin
from accelerate.config.environment import parse_flag_from_env
from accelerate.errors import NotYetSupported, Unfit
from accelerate.state.partial import PartialState
from accelerate.versions import compare_versions

if TYPE_CHECKING:
    from accelerate.config.deepspeed import DeepSpeedPlugin
    from accelerate.config.fsdp import FullyShardedDataParallelPlugin
    from accelerate.config.megatron import MegatronLMPlugin
    from accelerate.config.parallel import TorchTensorParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

logger: logging.Logger = logging.getLogger(__name__)

OLDEST_DEEPSPEED = "0.16.4"
OLDEST_MEGATRON = "0.16.0"


def mesh_config(
    config: ParallelismConfig | None, tensor_parallel: TorchTensorParallelPlugin | None
) -> ParallelismConfig | None:
    """The axes of the mesh, if there shall be one."""
    asked = parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")
    if config is None and tensor_parallel is None and not asked:
        return None
    from accelerate.parallelism_config import ParallelismConfig

    if config is not None and not isinstance(config, ParallelismConfig):
        raise TypeError(f"parallelism_config is a {type(config).__name__}: pass a ParallelismConfig.")
    if config is None and asked:
        config = ParallelismConfig()
    if tensor_parallel is not None:
        if config is not None:
            raise ValueError(
                "Pass either `torch_tp_plugin` or `parallelism_config`, not both: ParallelismConfig has tp_size."
            )
        config = ParallelismConfig(tp_size=tensor_parallel.tp_size)
        config.device_mesh = tensor_parallel.torch_device_mesh
    return config


def fsdp_plugin(
    plugin: FullyShardedDataParallelPlugin | None, config: ParallelismConfig | None
) -> FullyShardedDataParallelPlugin | None:
    """The settings of FSDP, where it was asked for, or is needed for an axis of the mesh."""
    needed = config is not None and (config.dp_shard_enabled or config.cp_enabled)
    asked = parse_flag_from_env("ACCELERATE_USE_FSDP")
    if plugin is None and not needed and not asked:
        return None
    from accelerate.config.fsdp import FullyShardedDataParallelPlugin

    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise TypeError(f"fsdp_plugin is a {type(plugin).__name__}: pass a FullyShardedDataParallelPlugin.")
    if plugin is None:
        version: Any = 2 if needed and not (asked and "FSDP_VERSION" in os.environ) else None
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    if needed and plugin.fsdp_version != 2:
        raise ValueError(
            f"{config!r} needs FSDP version 2, but the plugin is for version {plugin.fsdp_version}: "
            "pass FullyShardedDataParallelPlugin(fsdp_version=2), or set FSDP_VERSION=2."
        )
    return plugin


def deepspeed_plugins(given: Any, fsdp: FullyShardedDataParallelPlugin | None) -> dict[str, DeepSpeedPlugin]:
    """The settings of DeepSpeed by name, where it was asked for; none where it was not."""
    if given is None and not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return {}
    from accelerate.config.deepspeed import DeepSpeedPlugin

    if given is None:
        given = DeepSpeedPlugin()
    plugins: dict[str, Any] = given if isinstance(given, dict) else {"default": given}
    for name, plugin in plugins.items():
        if not isinstance(plugin, DeepSpeedPlugin):
            which = f"deepspeed_plugins[{name!r}]" if isinstance(given, dict) else "deepspeed_plugin"
            raise TypeError(f"{which} is a {type(plugin).__name__}: pass a DeepSpeedPlugin.")
        if plugin.hf_ds_config.is_true("msamp.enabled"):
            raise NotYetSupported("MS-AMP with DeepSpeed (`enable_msamp`)", "leave it out, and use 'bf16'.")
    if not plugins:
        raise ValueError("deepspeed_plugins is an empty dict: give each DeepSpeedPlugin a name in it.")
    if fsdp is not None:
        raise ValueError("A model is spread either by DeepSpeed or by FSDP: leave out one of the two plugins.")
    if not is_deepspeed_available():
        raise ImportError("DeepSpeed was asked for and is not installed: pip install deepspeed")
    if compare_versions("deepspeed", "<", OLDEST_DEEPSPEED):
        raise ImportError(
            f"The installed DeepSpeed is older than {OLDEST_DEEPSPEED}, the first one for the releases of torch that "
            "this package supports: pip install --upgrade deepspeed"
        )
    return plugins


def set_up_deepspeed(state: PartialState) -> None:
    """Everything that DeepSpeed wants to find in a process, which it looks for when it is imported and started."""
    os.environ.setdefault("DS_ACCELERATOR", state.device.type)
    try:
        import_module("deepspeed.accelerator")
    except Exception as error:
        raise ImportError(
            f"DeepSpeed is installed and cannot be imported ({type(error).__name__}: {error}): install it again, with "
            "the torch that is here."
        ) from error
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # libraries that load pretrained models look there
    os.environ.update({name: value for name, value in state.world.variables().items() if name not in os.environ})
    if state.backend is None:
        state.backend = join_alone(state.device_kind.name, state.device_kind.backend)


def megatron_plugin(given: Any, others: dict[str, Any], mixed_precision: str) -> MegatronLMPlugin | None:
    """The settings of Megatron-LM, where it was asked for. others: what else may spread a model, by its name."""
    if given is None and not parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        return None
    from accelerate.config.megatron import MegatronLMPlugin

    if given is not None and not isinstance(given, MegatronLMPlugin):
        raise TypeError(f"megatron_lm_plugin is a {type(given).__name__}: pass a MegatronLMPlugin.")
    for name, other in others.items():
        if other is not None:
            raise ValueError(f"A model is spread either by Megatron-LM or by {name}: leave out one of the two.")
    if mixed_precision == "fp8":
        raise NotYetSupported("mixed_precision='fp8' with Megatron-LM", "use 'bf16', or FSDP to spread the model.")
    if not has_package("megatron.core"):
        raise ImportError("Megatron-LM was asked for and is not installed: pip install megatron-core")
    if compare_versions("megatron-core", "<", OLDEST_MEGATRON):
        raise ImportError(
            f"The installed megatron-core is older than {OLDEST_MEGATRON}, whose way to make optimizers is used here: "
            "pip install --upgrade megatron-core"
        )
    plugin = MegatronLMPlugin() if given is None else given
    plugin.set_mixed_precision(mixed_precision)
    return plugin


def set_up_megatron(state: PartialState) -> None:
    """A group of processes for Megatron-LM to divide, also where there is one process."""
    try:
        import_module("megatron.core")
    except Exception as error:
        raise ImportError(
            f"megatron-core is installed and cannot be imported ({type(error).__name__}: {error}): install it again, "
            "for the torch that is here."
        ) from error
    gpus = devices.by_name("cuda")
    if gpus.count() == 0 or (gpus.available() and state.device.type != gpus.name):
        raise Unfit(
            f"Megatron-LM runs on GPUs that are devices of `torch.cuda`, and rank {state.process_index} is on "
            f"{state.device}: start it on such GPUs, or spread the model with FSDP (`fsdp_plugin`)."
        )
    os.environ["ACCELERATE_USE_MEGATRON_LM"] = "true"  # where scripts ask whether it is the engine
    if state.backend is None:
        os.environ.update({name: value for name, value in state.world.variables().items() if name not in os.environ})
        state.backend = join_alone(state.device_kind.name, state.device_kind.backend)


def check_dynamo_plugin(plugin: Any) -> None:
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        kind = type(plugin).__name__
        raise TypeError(f"dynamo_plugin is a {kind}: pass a TorchDynamoPlugin, or a name as `dynamo_backend`.")


def settings_of(plugin: Any) -> dict[str, Any]:
    """The fields of a plugin as they are now, whatever is done with it later."""
    return {field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin) if field.compare}


def differences(plugin: Any, first: Any, settings: dict[str, Any]) -> list[str]:
    """What is asked for by a second plugin. settings: what the first was asked for, before anything was filled in."""
    return [
        f"{name}={value!r} (it is {settings[name]!r})"
        for name, value in settings_of(plugin).items()
        if not _same(value, settings[name]) and not _same(value, getattr(first, name))
    ]


def _same(value: Any, other: Any) -> bool:
    """Whether two settings mean the same. Functions do that were made twice from the same lines, as policies are."""
    if isinstance(value, functools.partial) and isinstance(other, functools.partial):
        return (_same(value.func, other.func), value.args, value.keywords) == (True, other.args, other.keywords)
    if isinstance(value, FunctionType) and isinstance(other, FunctionType):
        cells = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (value, other)]
        return value.__code__ is other.__code__ and value.__defaults__ == other.__defaults__ and cells[0] == cells[1]
    return bool(value == other)


def fsdp_is_on(plugin: FullyShardedDataParallelPlugin | None, state: PartialState) -> bool:
    """Whether FSDP is the engine: where it was asked for, and there is somebody to share the model with."""
    if plugin is None:
        return False
    if state.backend is None:
        logger.warning(
            "FSDP has nothing to shard across, since there is only one process: start several with `accelerate "
            "launch --num_processes`, or one GPU process with `torchrun`; the models stay unsharded."
        )
        return False
    # Libraries that load pretrained models look there.
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    return True


def downcast_is_on(mixed_precision: str, state: PartialState) -> bool:
    """Whether parameters on an XLA device are kept in bf16, as `--downcast_bf16` asks."""
    asked = parse_flag_from_env("ACCELERATE_DOWNCAST_BF16")
    if asked and (mixed_precision != "bf16" or state.device.type != "xla"):
        raise ValueError(
            f"ACCELERATE_DOWNCAST_BF16 (`--downcast_bf16`) is for mixed_precision='bf16' on an XLA device, and this is "
            f"{mixed_precision!r} on {state.device}: leave it out."
        )
    return asked


def mesh(
    config: ParallelismConfig | None,
    plugin: FullyShardedDataParallelPlugin | None,
    state: PartialState,
    *,
    deepspeed: bool = False,
) -> Any:
    """The device mesh, as large as the run; None where one is not asked for."""
    if config is None:
        return None
    if config.total_size == 1:
        # Only that there is a mesh was asked for: the axis is that of the engine.
        axis = "dp_replicate" if plugin is None else "dp_shard"
        setattr(config, f"{axis}_size", state.num_processes)
    if config.sp_enabled:
        if not deepspeed:
            raise ValueError(
                f"sp_size={config.sp_size} has DeepSpeed cut sequences, which was not asked for: pass a "
                "`deepspeed_plugin`, or use cp_size."
            )
        # DeepSpeed spreads the model over all processes by itself: those that are left are copies to the mesh.
        config.dp_replicate_size = config.dp_replicate_size or 1
        if state.num_processes % config.total_size == 0:
            config.dp_replicate_size *= state.num_processes // config.total_size
    if config.total_size != state.num_processes:
        sizes = " x ".join(f"{axis}_size={config._sizes[axis]}" for axis in config.active_mesh_dims)
        raise ValueError(
            f"The ParallelismConfig is for {config.total_size} processes ({sizes}), but there are "
            f"{state.num_processes}: make the product of its sizes the number of processes."
        )
    return config.get_device_mesh(state.device.type)
