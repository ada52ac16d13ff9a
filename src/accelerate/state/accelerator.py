"""AcceleratorState: the distributed set-up plus what an `Accelerator` was asked to do with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from accelerate.available import is_fp8_available
from accelerate.config.dynamo import TorchDynamoPlugin
from accelerate.config.enums import DistributedType, PrecisionType
from accelerate.config.environment import parse_flag_from_env
from accelerate.errors import check_kind
from accelerate.per_rank import ThreadLocalSharedDict
from accelerate.state import engines
from accelerate.state.partial import PartialState

if TYPE_CHECKING:
    from accelerate.config.deepspeed import DeepSpeedPlugin
    from accelerate.config.fsdp import FullyShardedDataParallelPlugin
    from accelerate.config.megatron import MegatronLMPlugin
    from accelerate.parallelism_config import ParallelismConfig


_PRECISION = "ACCELERATE_MIXED_PRECISION"

# What is given for a mode by its other names, those of torch among them.
_OTHER_WORDS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "no",
    "fp32": "no",
    "false": "no",
}


class AcceleratorState(PartialState):
    """Hold the settings of a run. The first `Accelerator` creates it, and all instances share them.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        cpu: run on the CPU even if there is an accelerator.
        dynamo_plugin: how models are compiled.
        deepspeed_plugin: the settings of DeepSpeed.
        fsdp_plugin: the settings of FSDP.
        torch_tp_plugin: the settings of tensor parallelism.
        megatron_lm_plugin: the settings of Megatron-LM.
        parallelism_config: the axes of the device mesh.
        _from_accelerator: whether an `Accelerator` creates it.
        **kwargs: arguments of `PartialState`.
    """

    _shared_state: Any = ThreadLocalSharedDict()

    distributed_type: DistributedType
    dynamo_plugin: TorchDynamoPlugin | None
    # There only where FSDP is the engine: that is how scripts ask.
    fsdp_plugin: FullyShardedDataParallelPlugin
    # None where Megatron-LM is not the engine.
    megatron_lm_plugin: MegatronLMPlugin | None = None
    parallelism_config: ParallelismConfig | None
    # By name, where DeepSpeed is the engine.
    deepspeed_plugins: Any = None
    device_mesh: Any
    # Whether parameters on an XLA device are kept in bf16, too.
    downcast_bfloat: bool

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        mixed_precision = _checked_precision(mixed_precision)
        if _from_accelerator and self._group_ended:
            # A second training after `end_training`: all processes come here, and meet again.
            self._reset_state(reset_partial_state=True)
        check_kind("dynamo_plugin", dynamo_plugin, TorchDynamoPlugin, ", or a name as `dynamo_backend`")
        plugins = {
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "parallelism_config": parallelism_config,
            "dynamo_plugin": dynamo_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "deepspeed_plugin": deepspeed_plugin,
        }
        if self.initialized:
            self._check_unchanged(mixed_precision, cpu)
            self._check_group_options(kwargs)
            for name, plugin in plugins.items():
                if plugin is not None:
                    engines.kind_of(name).check_second(name, plugin, self)
            return
        if not _from_accelerator:
            raise ValueError("There is no AcceleratorState yet: create an `Accelerator()` first, then read its state.")
        # Everything that may fail comes first: a half-made state would pass for a finished one.
        mixed_precision = str(mixed_precision or _checked_precision(os.environ.get(_PRECISION, "no"), _PRECISION))
        parallelism_config = _mesh_config(parallelism_config, torch_tp_plugin)
        engine = engines.asked(plugins, parallelism_config, mixed_precision)
        dynamo_plugin = dynamo_plugin or TorchDynamoPlugin()
        plugins |= {"parallelism_config": parallelism_config, "dynamo_plugin": dynamo_plugin, **engine.plugins()}
        del plugins["deepspeed_plugin"]  # a second Accelerator is told of the very same objects
        # As they are now: a mesh fills in its sizes, and the precision sets that of a sharded model.
        asked = {name: (plugin, engines.settings_of(plugin)) for name, plugin in plugins.items() if plugin is not None}
        engine.before_process(cpu)
        partial = PartialState(cpu, **kwargs)
        downcast = _downcast_is_on(mixed_precision, partial)
        engine.set_up(partial)
        device_mesh = None if parallelism_config is None else _mesh(parallelism_config, engine, partial)
        self.__dict__.update(partial.__dict__)
        self.parallelism_config = parallelism_config
        self.device_mesh = device_mesh
        engine.show(self)
        self._mixed_precision = mixed_precision
        self.downcast_bfloat = downcast
        self.dynamo_plugin = dynamo_plugin
        self._asked = asked

    def __repr__(self) -> str:
        return super().__repr__() + f"\nMixed precision type: {self.mixed_precision}\n"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget everything; with `reset_partial_state` the distributed set-up too."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @staticmethod
    @contextmanager
    def _forgotten_if_refused() -> Iterator[None]:
        """Forget a state that is made in here where an error follows: the next Accelerator may ask for another one."""
        before = AcceleratorState._shared_state.get("_asked")
        flags = {name: os.environ.get(name) for name in engines.VARIABLES}
        try:
            yield
        except BaseException:
            if AcceleratorState._shared_state.get("_asked") is not before:
                AcceleratorState._reset_state()
                for name, value in flags.items():  # which the engine may have set
                    os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            raise

    @property
    def mixed_precision(self) -> str:
        """How numbers are cast: "no", "fp16", "bf16" or "fp8"; under DeepSpeed, as the plugin in use says."""
        plugin = self.deepspeed_plugin
        return str(self._mixed_precision) if plugin is None else plugin.mixed_precision

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The settings of DeepSpeed; None where it is not the engine."""
        if self.deepspeed_plugins is None:
            return None
        plugin: DeepSpeedPlugin = next(plugin for plugin in self.deepspeed_plugins.values() if plugin.selected)
        return plugin

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return one of several DeepSpeed plugins.

        Args:
            name: the name it was given.
        """
        if self.deepspeed_plugins is None:
            raise ValueError("DeepSpeed is not the engine of this process, so there are no plugins of it.")
        if name not in self.deepspeed_plugins:
            raise KeyError(f"No DeepSpeed plugin is named {name!r}: there are {', '.join(self.deepspeed_plugins)}.")
        plugin: DeepSpeedPlugin = self.deepspeed_plugins[name]
        return plugin

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Use another one of several DeepSpeed plugins for what is prepared from now on.

        Args:
            name: the name it was given.
        """
        if name is None:
            raise ValueError("Say which plugin to use: `select_deepspeed_plugin(name)`.")
        chosen = self.get_deepspeed_plugin(name)
        for plugin in self.deepspeed_plugins.values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP version 2 is the engine."""
        plugin: Any = self.__dict__.get("fsdp_plugin")
        return plugin is not None and plugin.fsdp_version == 2

    def _check_unchanged(self, mixed_precision: str | None, cpu: bool) -> None:
        if cpu and not self._cpu:
            self._refuse("cpu=True")
        if mixed_precision is not None and mixed_precision != self._mixed_precision:
            self._refuse(f"mixed_precision={mixed_precision!r} (it is {self._mixed_precision!r})")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"The state of this process is already set up and cannot be changed to {what}: pass it to the first "
            "`Accelerator()` of the process, or restart it."
        )


def _checked_precision(given: Any, name: str = "mixed_precision") -> str | None:
    if given is None:
        return None
    mode = str(given).lower()
    if mode not in PrecisionType:
        from accelerate.text import did_you_mean

        choices = PrecisionType.list()
        near = did_you_mean(_OTHER_WORDS.get(mode.removeprefix("torch."), mode), choices)
        raise ValueError(f"{name} is {given!r}: choose one of {', '.join(choices)}{near}.")
    if mode == "fp8" and not is_fp8_available():
        raise ValueError(
            "mixed_precision='fp8' needs torchao, Transformer Engine or MS-AMP, but none of them is installed: "
            "`pip install torchao`, or use 'bf16'."
        )
    return mode


def _mesh_config(config: Any, tensor_parallel: Any) -> ParallelismConfig | None:
    """The axes of the mesh that was asked for, here or by the launch."""
    launched = parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")
    if config is None and tensor_parallel is None and not launched:
        return None
    from accelerate.config.parallel import TorchTensorParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    check_kind("parallelism_config", config, ParallelismConfig)
    check_kind("torch_tp_plugin", tensor_parallel, TorchTensorParallelPlugin)
    if tensor_parallel is None:
        return config or ParallelismConfig()
    if config is not None or launched:
        raise ValueError(
            "Pass either `torch_tp_plugin` or `parallelism_config`, not both: ParallelismConfig has tp_size."
        )
    config = ParallelismConfig(tp_size=tensor_parallel.tp_size)
    config.device_mesh = tensor_parallel.torch_device_mesh
    return config


def _mesh(config: ParallelismConfig, engine: engines.EngineSetup, state: PartialState) -> Any:
    """The device mesh, as large as the run."""
    if config.total_size == 1:
        # Only that there is a mesh was asked for: the axis is that of the engine.
        setattr(config, f"{engine.axis}_size", state.num_processes)
    if config.sp_enabled:
        if not engine.cuts_sequences:
            raise ValueError(
                f"sp_size={config.sp_size} splits sequences with DeepSpeed, which is not in use: pass a "
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


def _downcast_is_on(mixed_precision: str, state: PartialState) -> bool:
    """Whether parameters on an XLA device are kept in bf16, as `--downcast_bf16` asks."""
    asked = parse_flag_from_env("ACCELERATE_DOWNCAST_BF16")
    if asked and (mixed_precision != "bf16" or state.device.type != "xla"):
        raise ValueError(
            "ACCELERATE_DOWNCAST_BF16 (`--downcast_bf16`) is for mixed_precision='bf16' on an XLA device, but this "
            f"is {mixed_precision!r} on {state.device}: leave it out."
        )
    return asked
