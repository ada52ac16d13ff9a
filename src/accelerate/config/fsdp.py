"""How FSDP spreads a model: the settings of both versions, and the variables that stand in for those left out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accelerate.config.environment import parse_flag_from_env, str_to_bool
from accelerate.config.fsdp_values import (
    DTYPES,
    PREFIX,
    give_memory,
    member,
    precision_policy,
    version_of,
    xla_settings,
)
from accelerate.config.wrap_policy import POLICIES, min_num_params
from accelerate.constants import FSDP2_STATE_DICT_TYPE

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import fsdp

RAM_EFFICIENT_LOADING = PREFIX + "CPU_RAM_EFFICIENT_LOADING"

# How torch puts each type of state dict together: of models, of optimizers, and with what.
_STATE_DICT_CONFIGS: dict[str, tuple[str, str, dict[str, bool]]] = {
    "FULL_STATE_DICT": (
        "FullStateDictConfig",
        "FullOptimStateDictConfig",
        {"offload_to_cpu": True, "rank0_only": True},
    ),
    "SHARDED_STATE_DICT": ("ShardedStateDictConfig", "ShardedOptimStateDictConfig", {"offload_to_cpu": True}),
}


def enable_fsdp_ram_efficient_loading() -> None:
    """Ask loaders of pretrained models to read weights on rank 0 only."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ[RAM_EFFICIENT_LOADING] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Make every rank read weights by itself again."""
    os.environ[RAM_EFFICIENT_LOADING] = "False"


@dataclass
class FullyShardedDataParallelPlugin:
    """Train with FSDP: every process holds a part of each parameter, of its gradient and of its optimizer state.

    What is not given is read from the `FSDP_*` variables, which the launcher sets.

    Args:
        fsdp_version: 1, or 2 for `fully_shard`.
        sharding_strategy: version 1: what is sharded, and over which processes.
        reshard_after_forward: free gathered parameters between forward and backward; version 1 takes a sharding
            strategy.
        backward_prefetch: version 1: when the parameters of the next layer are fetched in backward.
        mixed_precision_policy: the dtypes of gathered parameters and reduced gradients; a name or a policy.
        auto_wrap_policy: which parts of a model are gathered one at a time.
        cpu_offload: keep parameters on the host, and fetch them for forward and backward.
        ignored_modules: modules that are not sharded: a list, or a regular expression for their names.
        state_dict_type: how checkpoints are written: as a full state dict, or as one shard per process.
        state_dict_config: version 1: how a state dict is put together.
        optim_state_dict_config: version 1: how the state dict of an optimizer is put together.
        limit_all_gathers: version 1: do not fetch parameters far ahead of the computation.
        use_orig_params: version 1: keep the model's own parameters; version 2 always does.
        param_init_fn: version 1: how to give a module on the meta device its memory.
        sync_module_states: version 1: start from the weights of the first process on all processes.
        forward_prefetch: version 1: fetch the next layer's parameters before this one computes.
        activation_checkpointing: recompute the activations of each wrapped part in the backward instead of keeping
            them.
        activation_checkpointing_offload: version 2: keep checkpointed activations on the host.
        cpu_ram_efficient_loading: read pretrained weights on the first process only, and send each process its shards.
        transformer_cls_names_to_wrap: the classes of the layers that `transformer_based_wrap` gathers.
        min_num_params: from how many parameters on `size_based_wrap` gathers a part by itself.
        xla_fsdp_settings: on XLA devices: `shard_param_on_dim_0` cuts parameters along their first dimension.
        xla_fsdp_grad_ckpt: on XLA devices: the same as `activation_checkpointing`.
    """

    fsdp_version: int = None  # type: ignore[assignment]
    sharding_strategy: str | fsdp.ShardingStrategy | None = None
    reshard_after_forward: str | fsdp.ShardingStrategy | bool | None = None
    backward_prefetch: str | fsdp.BackwardPrefetch | None = None
    mixed_precision_policy: dict[str, Any] | str | fsdp.MixedPrecision | fsdp.MixedPrecisionPolicy | None = None
    auto_wrap_policy: Callable[..., Any] | Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None = None
    cpu_offload: bool | fsdp.CPUOffload | fsdp.CPUOffloadPolicy | None = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: str | fsdp.StateDictType | None = None
    state_dict_config: fsdp.FullStateDictConfig | fsdp.ShardedStateDictConfig | None = None
    optim_state_dict_config: fsdp.FullOptimStateDictConfig | fsdp.ShardedOptimStateDictConfig | None = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool = None  # type: ignore[assignment]
    activation_checkpointing: bool = None  # type: ignore[assignment]
    activation_checkpointing_offload: bool = None  # type: ignore[assignment]
    cpu_ram_efficient_loading: bool = None  # type: ignore[assignment]
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    xla_fsdp_settings: dict[str, Any] | None = None
    xla_fsdp_grad_ckpt: bool = None  # type: ignore[assignment]

    # Whether the names in the settings were found in a model; another one may have other parts.
    _has_met_a_model = False
    # Version 2, and nobody has said which parts are gathered one at a time: the engine finds the blocks of the model.
    _finds_blocks = False

    def __post_init__(self) -> None:
        self.fsdp_version = version_of(self.fsdp_version)
        if self.fsdp_version == 1:
            self._set_sharding()
            self._set_prefetch()
        else:
            self._set_reshard()
            self._drop_version_1()
        min_num_params()  # also where nothing asks for it yet: a wrong number would pass unseen
        self._set_wrap_policy()
        self._set_flags()
        self.xla_fsdp_settings = xla_settings(self.xla_fsdp_settings)
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self.set_state_dict_type()
        if self.ignored_modules is None:
            self.ignored_modules = os.environ.get(PREFIX + "IGNORED_MODULES")
        if self.mixed_precision_policy is not None:
            if isinstance(self.mixed_precision_policy, (str, dict)):
                self.set_mixed_precision(self.mixed_precision_policy, override=True)
            self.validate_mixed_precision_policy()

    # --- what is sharded ----------------------------------------------------------------------------------------

    def _set_sharding(self) -> None:
        from torch.distributed.fsdp import ShardingStrategy

        asked = self.sharding_strategy
        if asked is None:
            asked = os.environ.get(PREFIX + "SHARDING_STRATEGY", "FULL_SHARD")
        self.sharding_strategy = member(ShardingStrategy, asked, "sharding_strategy")
        reshard = self.reshard_after_forward
        if reshard is None:
            return
        if isinstance(reshard, bool):
            raise ValueError(
                f"reshard_after_forward={reshard} is for FSDP version 2; with version 1 give a sharding strategy "
                "('FULL_SHARD', 'SHARD_GRAD_OP', ...), or pass fsdp_version=2."
            )
        self.reshard_after_forward = member(ShardingStrategy, reshard, "reshard_after_forward")

    @property
    def _sharding(self) -> Any:
        """Version 1: the strategy asked for, under its newer or its older name."""
        return self.sharding_strategy if self.reshard_after_forward is None else self.reshard_after_forward

    def _set_reshard(self) -> None:
        if self.sharding_strategy is not None:
            raise ValueError(
                f"sharding_strategy={self.sharding_strategy!r} is for FSDP version 1; with version 2 pass "
                "reshard_after_forward=True (as FULL_SHARD) or False (as SHARD_GRAD_OP)."
            )
        reshard = self.reshard_after_forward
        if reshard is None:
            reshard = os.environ.get(PREFIX + "RESHARD_AFTER_FORWARD", "true")
        if isinstance(reshard, str):
            try:
                reshard = bool(str_to_bool(reshard))
            except ValueError as error:
                raise ValueError(f"reshard_after_forward of FSDP version 2 cannot be read: {error}") from None
        if not isinstance(reshard, bool):
            raise ValueError(f"reshard_after_forward is {reshard!r}: FSDP version 2 takes True or False.")
        self.reshard_after_forward = reshard

    def _set_prefetch(self) -> None:
        from torch.distributed.fsdp import BackwardPrefetch

        asked: Any = self.backward_prefetch
        if asked is None:
            asked = os.environ.get(PREFIX + "BACKWARD_PREFETCH", "NO_PREFETCH")
        none = isinstance(asked, str) and asked.upper() == "NO_PREFETCH"
        self.backward_prefetch = None if none else member(BackwardPrefetch, asked, "backward_prefetch")

    def _drop_version_1(self) -> None:
        """Version 2 fetches by itself, always uses the model's parameters, and needs no copy from rank 0."""
        for name in ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "param_init_fn"):
            if getattr(self, name) is not None:
                warnings.warn(
                    f"`{name}` is a setting of FSDP version 1 and does nothing in version 2: leave it out.",
                    stacklevel=4,
                )
                setattr(self, name, None)

    def _set_flags(self) -> None:
        flags = [
            "activation_checkpointing",
            "activation_checkpointing_offload",
            "cpu_ram_efficient_loading",
            "xla_fsdp_grad_ckpt",
        ]
        if self.cpu_ram_efficient_loading is not None:
            # Those who load pretrained models look there.
            os.environ[RAM_EFFICIENT_LOADING] = str(bool(self.cpu_ram_efficient_loading))
        if self.fsdp_version == 1:
            flags += ["use_orig_params", "sync_module_states", "forward_prefetch"]
        for name in flags:
            if getattr(self, name) is None:
                setattr(self, name, parse_flag_from_env(PREFIX + name.upper()))
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError(
                "activation_checkpointing_offload=True has nothing to keep on the host: "
                "pass activation_checkpointing=True as well."
            )
        if self.activation_checkpointing_offload and self.fsdp_version == 1:
            raise ValueError("activation_checkpointing_offload=True is for FSDP version 2: pass fsdp_version=2.")
        if self.fsdp_version == 1 and self.cpu_ram_efficient_loading and not self.sync_module_states:
            # Only the first process has the weights.
            self.sync_module_states = True
        if self.sync_module_states and self.param_init_fn is None:
            # For those who hand these settings to FullyShardedDataParallel themselves.
            self.param_init_fn = give_memory

    # --- which parts of a model are gathered at a time ----------------------------------------------------------

    def _set_wrap_policy(self) -> None:
        policy: Any = self.auto_wrap_policy
        if policy is None and self.transformer_cls_names_to_wrap and PREFIX + "AUTO_WRAP_POLICY" not in os.environ:
            policy = "TRANSFORMER_BASED_WRAP"  # what else could the names be for
        named = policy is not None or PREFIX + "AUTO_WRAP_POLICY" in os.environ
        self._finds_blocks = self.fsdp_version == 2 and not named
        if policy is None:
            policy = os.environ.get(PREFIX + "AUTO_WRAP_POLICY", "NO_WRAP")
        if not isinstance(policy, str):
            return
        kind = POLICIES.get(policy.upper())
        if kind is None:
            known = ", ".join(name.lower() for name in POLICIES)
            raise ValueError(f"auto_wrap_policy is {policy!r}: choose one of {known}, or pass a function.")
        kind.read_variables(self)
        self.auto_wrap_policy = kind.torch_function()

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Adapt the wrap policy to a model: look up its layer classes, or insert the number of parameters.

        Args:
            model: the model.
        """
        policy: Any = self.auto_wrap_policy
        for kind in POLICIES.values():
            if policy is not None and kind.is_kind_of(policy):
                self.auto_wrap_policy = kind.of_model(self, model)

    # --- where and how numbers are kept -------------------------------------------------------------------------

    def set_cpu_offload(self) -> None:
        """Convert a bool to the policy object of the FSDP version."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        if self.cpu_offload is None:
            self.cpu_offload = parse_flag_from_env(PREFIX + "OFFLOAD_PARAMS")
        if not isinstance(self.cpu_offload, bool):
            return
        if self.fsdp_version == 1:
            self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)
        else:
            self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()  # type: ignore[assignment]

    def validate_cpu_offload(self) -> None:
        """Raise if the policy object belongs to the other FSDP version."""
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        wanted = CPUOffload if self.fsdp_version == 1 else OffloadPolicy
        if not isinstance(self.cpu_offload, wanted):
            raise ValueError(
                f"cpu_offload is {self.cpu_offload!r}, but FSDP version {self.fsdp_version} takes True, False or a "
                f"`torch.distributed.fsdp.{wanted.__name__}`."
            )

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the precision in which parameters are kept and exchanged.

        Args:
            mixed_precision: "bf16", "fp16", "fp32" or a dict of dtypes.
            buffer_autocast: keep buffers in fp32.
            override: replace a policy that is already set.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        self.mixed_precision_policy = precision_policy(self.fsdp_version, mixed_precision, buffer_autocast)

    def validate_mixed_precision_policy(self) -> None:
        """Raise if the policy object belongs to the other FSDP version."""
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        wanted = MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy
        if not isinstance(self.mixed_precision_policy, wanted):
            raise ValueError(
                f"mixed_precision_policy is {self.mixed_precision_policy!r}, but FSDP version {self.fsdp_version} "
                f"takes a name ({', '.join(DTYPES)}), a dict or a `torch.distributed.fsdp.{wanted.__name__}`."
            )

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how checkpoints hold the weights.

        Args:
            state_dict_type: "FULL_STATE_DICT" or "SHARDED_STATE_DICT". By default that of the plugin.
        """
        from torch.distributed import fsdp

        asked: Any = self.state_dict_type if state_dict_type is None else state_dict_type
        if asked is None:
            default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
            asked = os.environ.get(PREFIX + "STATE_DICT_TYPE", default)
        kind = member(fsdp.StateDictType, asked, "state_dict_type")
        if self.fsdp_version == 2 and kind.name not in FSDP2_STATE_DICT_TYPE:
            raise ValueError(
                f"state_dict_type is {kind.name}: FSDP version 2 knows {' and '.join(FSDP2_STATE_DICT_TYPE)}."
            )
        changed = state_dict_type is not None and kind != self.state_dict_type
        self.state_dict_type = kind
        if kind.name not in _STATE_DICT_CONFIGS:
            return
        model, optimizer, arguments = _STATE_DICT_CONFIGS[kind.name]
        if self.state_dict_config is None or changed:
            self.state_dict_config = getattr(fsdp, model)(**arguments)
        if self.optim_state_dict_config is None or changed:
            self.optim_state_dict_config = getattr(fsdp, optimizer)(**arguments)
