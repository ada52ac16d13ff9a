"""How DeepSpeed spreads a training: its settings, and stand-ins for what it makes itself."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.config.deepspeed_file import HfDeepSpeedConfig
from accelerate.config.environment import flag, parse_flag_from_env, read_variable
from accelerate.errors import warn

if TYPE_CHECKING:
    from torch import nn

_OPT_LEVELS = ("O1", "O2")
_PLACES = ("none", "cpu", "nvme")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "offload_optimizer_device": _PLACES,
    "offload_param_device": _PLACES,
}
# Arguments that say what a config says by leaving them out.
_NOTHING = ("none", "auto", "False")
_PREFIX = "ACCELERATE_DEEPSPEED_"


class _PluginSetting(NamedTuple):
    """Where a field of the plugin comes from, and where it stands in a DeepSpeed config."""

    default: Any
    read: Callable[[str], Any]
    key: str | None = None
    variable: str = ""  # by default as the field


def _setting(default: Any, read: Callable[[str], Any], key: str | None = None, variable: str = "") -> Any:
    return field(default=None, metadata={"setting": _PluginSetting(default, read, key, variable)})


def _number_or_auto(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: text if text == "auto" else read(text)


@dataclass
class DeepSpeedPlugin:
    """Train with DeepSpeed. Settings that are not given are read from the `ACCELERATE_DEEPSPEED_*` variables.

    `deepspeed_config` is the dict that DeepSpeed gets: `hf_ds_config`, or one made of the other settings. An "auto" in
    the config is replaced by the setting; any other value there takes precedence over it.

    Args:
        hf_ds_config: a DeepSpeed config: a path, a dict, HfDeepSpeedConfig.
        gradient_accumulation_steps: how many micro-batches make one step; 'auto' takes the Accelerator's.
        gradient_clipping: the norm to clip at, or 'auto'.
        zero_stage: what is sharded: 0 nothing, 1 optimizer states, 2 gradients, 3 parameters.
        is_train_batch_min: of several loaders, take the smallest batch size for 'auto', or the largest.
        offload_optimizer_device: none, cpu or nvme.
        offload_param_device: none, cpu or nvme; for stage 3.
        offload_optimizer_nvme_path: the folder on the NVMe disk.
        offload_param_nvme_path: the folder on the NVMe disk.
        zero3_init_flag: stage 3: shard transformers models while they are built.
        zero3_save_16bit_model: stage 3: gather weights to save.
        transformer_moe_cls_names: classes of mixture-of-experts layers, separated by commas.
        enable_msamp: train in fp8 with MS-AMP.
        msamp_opt_level: how much of it MS-AMP does: O1 or O2.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = _setting(
        "auto", _number_or_auto(int), "gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    )
    gradient_clipping: float | str | None = _setting(
        "auto", _number_or_auto(float), "gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING"
    )
    zero_stage: int | None = _setting(2, int, "zero_optimization.stage")
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = _setting("none", str, "zero_optimization.offload_optimizer.device")
    offload_param_device: str | None = _setting("none", str, "zero_optimization.offload_param.device")
    offload_optimizer_nvme_path: str | None = _setting("none", str, "zero_optimization.offload_optimizer.nvme_path")
    offload_param_nvme_path: str | None = _setting("none", str, "zero_optimization.offload_param.nvme_path")
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = _setting(
        False, flag, "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    )
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = _setting(False, lambda text: text.upper() == "MSAMP", variable="ACCELERATE_FP8_BACKEND")
    msamp_opt_level: str | None = _setting("O1", str, variable="ACCELERATE_FP8_OPT_LEVEL")

    def __post_init__(self) -> None:
        self._selected = False
        # What an engine has put in place of "auto" in the config, by key: the next one begins with "auto" again.
        self.filled: dict[str, Any] = {}
        given = {name: value for name in PLUGIN_SETTINGS if (value := getattr(self, name)) is not None}
        for name, setting in PLUGIN_SETTINGS.items():
            if getattr(self, name) is None:
                variable = setting.variable or _PREFIX + name.upper()
                setattr(self, name, read_variable(variable, setting.read, setting.default))
        if self.hf_ds_config is None:
            self.hf_ds_config = os.environ.get(_PREFIX + "CONFIG_FILE", "none")
        if isinstance(self.hf_ds_config, str) and self.hf_ds_config == "none":
            self.hf_ds_config = HfDeepSpeedConfig(self._own_config())
        else:
            self._take_config(given)
        self._check_choices()
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = float("inf")  # the script logs
        self._set_zero3_init()
        self._set_msamp()

    def _own_config(self) -> dict[str, Any]:
        def offload(part: str) -> dict[str, Any]:
            device, path = getattr(self, f"offload_{part}_device"), getattr(self, f"offload_{part}_nvme_path")
            return {"device": device, "nvme_path": path if device == "nvme" else None}

        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": {
                "stage": self.zero_stage,
                "offload_optimizer": offload("optimizer"),
                "offload_param": offload("param"),
                "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
            },
            "gradient_clipping": self.gradient_clipping,
        }

    def _take_config(self, given: dict[str, Any]) -> None:
        """Replace "auto" in the config by the fields, and take all other values from it. given: by the script."""
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        config = self.hf_ds_config.config
        if "zero_optimization" not in config:
            raise ValueError("The DeepSpeed config has no 'zero_optimization': add it, with at least a 'stage'.")
        config.setdefault("gradient_accumulation_steps", 1)
        _check_asked_once()
        keys = {name: setting.key for name, setting in PLUGIN_SETTINGS.items() if setting.key is not None}
        values = {key: getattr(self, name) for name, key in keys.items()}
        ignored = []
        for name, key in keys.items():
            self.fill_match(key, must_match=False, **values)
            value = self.hf_ds_config.get_value(key)
            if given.get(name, value) != value and (value is not None or str(given[name]) not in _NOTHING):
                said = "is not there" if value is None else f"is {value!r} there"
                ignored.append(f"{name}={given[name]!r} ({key} {said})")
            if value is not None and value != "auto":
                setattr(self, name, value)
        if ignored:
            warn(
                "The DeepSpeed config takes precedence, so these arguments of the DeepSpeedPlugin have no effect: "
                f"{', '.join(ignored)}: write 'auto' into the config, or leave them out."
            )
        self.hf_ds_config.set_stage_and_offload()

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            value = self.hf_ds_config.get_value(str(PLUGIN_SETTINGS[name].key))
            if value is not None and value not in choices:
                raise ValueError(
                    f"{name} is {value!r} for DeepSpeed: choose one of {', '.join(str(choice) for choice in choices)}."
                )

    def _set_zero3_init(self) -> None:
        zero3 = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag is None:
            self.zero3_init_flag = parse_flag_from_env(_PREFIX + "ZERO3_INIT", zero3)
        if self.zero3_init_flag and not zero3:
            warnings.warn("`zero3_init_flag` is for stage 3 of ZeRO and is off in other stages.", stacklevel=4)
            self.zero3_init_flag = False

    def _set_msamp(self) -> None:
        if self.msamp_opt_level not in _OPT_LEVELS:
            raise ValueError(f"msamp_opt_level is {self.msamp_opt_level!r}: choose one of {', '.join(_OPT_LEVELS)}.")
        if not self.enable_msamp:
            return
        if self.zero_stage == 3:
            raise NotImplementedError("MS-AMP does not work with stage 3 of ZeRO: choose stage 0, 1 or 2.")
        self.deepspeed_config.setdefault("msamp", {"enabled": True, "opt_level": self.msamp_opt_level})

    # --- values that are found out at `prepare` -----------------------------------------------------------------

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key of the config.

        Args:
            ds_key_long: the key, nested ones with dots.
            default: the value if the config does not have it.
        """
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Tell whether the value of a key is "auto".

        Args:
            ds_key_long: the key, nested ones with dots.
        """
        return bool(self.get_value(ds_key_long) == "auto")

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace "auto" by a value, or compare the value with the one in the config.

        Args:
            ds_key_long: the key, nested ones with dots.
            mismatches: a list that gets a sentence if they differ.
            must_match: compare.
            **kwargs: values by key.

        Raises:
            ValueError: the config has "auto", and there is no value.
        """
        node, last = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None or node.get(last) is None:
            return
        if node[last] == "auto":
            if ds_key_long not in kwargs:
                raise ValueError(
                    f"The DeepSpeed config leaves {ds_key_long!r} as 'auto', and there is no value to put in: "
                    "write one into the config, or pass it."
                )
            node[last] = kwargs[ds_key_long]
        elif must_match and mismatches is not None and node[last] != kwargs.get(ds_key_long, node[last]):
            mismatches.append(f"- {ds_key_long} is {node[last]!r} in the config, but {kwargs[ds_key_long]!r} here")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Call `fill_match` for every key of the config.

        Args:
            prefix: the key of `config` in the whole config, with a dot at the end.
            mismatches: a list that gets a sentence for each difference.
            config: the part of the config to process. By default all of it.
            must_match: compare values that are not "auto".
            **kwargs: values by key.

        Raises:
            ValueError: values differ, or the config has "auto" and there is no value.
        """
        found: list[str] = [] if mismatches is None else mismatches
        for name, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{name}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + name, found, must_match, **kwargs)
        if found and not prefix:
            raise ValueError(
                "The DeepSpeed config and the script disagree: write 'auto' into the config, or make them the same.\n"
                + "\n".join(found)
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable fp16 or bf16 in the config. With fp8, everything else is computed in bf16.

        Args:
            mixed_precision: "no", "fp16", "bf16" or "fp8".

        Raises:
            ValueError: the config enables another one.
        """
        config, wanted = self.deepspeed_config, "bf16" if mixed_precision == "fp8" else mixed_precision
        for mode in ("fp16", "bf16"):
            chosen = str(config.get(mode, {}).get("enabled", False)).lower() == "true"
            if chosen and wanted not in ("no", mode):
                raise ValueError(
                    f"mixed_precision is {mixed_precision!r}, but the DeepSpeed config has {mode} enabled: "
                    "write 'auto' there, or make them the same."
                )
        # With a section of its own, DeepSpeed expects inputs in that dtype.
        if wanted == "fp16":
            config.setdefault("fp16", {"enabled": True, "auto_cast": True})
        for mode in ("fp16", "bf16"):
            config.setdefault(mode, {"enabled": mode == wanted})
            values: dict[str, Any] = {f"{mode}.enabled": mode == wanted}
            self.fill_match(f"{mode}.enabled", must_match=False, **values)

    @property
    def mixed_precision(self) -> str:
        """The precision that the config has chosen: "no", "fp16" or "bf16"."""
        return next((mode for mode in ("fp16", "bf16") if self.hf_ds_config.is_true(f"{mode}.enabled")), "no")

    # --- one of several plugins ---------------------------------------------------------------------------------

    @property
    def selected(self) -> bool:
        """Whether this one of several plugins is in use."""
        return self._selected

    @selected.setter
    def selected(self, value: Any) -> None:
        raise NotImplementedError("`selected` is set by `AcceleratorState().select_deepspeed_plugin(name)`.")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Use this one of several plugins. Only `AcceleratorState.select_deepspeed_plugin` may call it.

        Args:
            _from_accelerator_state: whether that is who calls.
        """
        if not _from_accelerator_state:
            raise ValueError("Plugins are chosen by name: call `AcceleratorState().select_deepspeed_plugin(name)`.")
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False

    # --- models that are built in pieces ------------------------------------------------------------------------

    def is_zero3_init_enabled(self) -> bool | None:
        """Tell whether transformers models are built in shards from the start."""
        return self.zero3_init_flag

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Build transformers models in shards, or as a whole, inside a `with` block.

        Args:
            enable: build them in shards.
        """
        before = self.is_zero3_init_enabled()
        if before == enable:
            yield
            return
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Tell transformers how models are built, which it asks while it creates one, long before `prepare`."""
        from accelerate.available import is_transformers_available

        if not is_transformers_available():
            if self.zero3_init_flag:
                raise ImportError("`zero3_init_flag` is about models of transformers: install transformers.")
            return
        from transformers.integrations import HfDeepSpeedConfig as Known
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        if not self.zero3_init_flag and self.hf_ds_config.is_zero3():
            self.dschf: HfDeepSpeedConfig | None = None
            return
        config = copy.deepcopy(self.deepspeed_config)
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(key, "auto") == "auto":
                config[key] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        self.dschf = Known(config)  # transformers holds it weakly

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Make DeepSpeed gather each mixture-of-experts layer as a whole, since every rank uses other experts.

        Args:
            model: the model.

        Raises:
            ValueError: the model has no layer of a class in `transformer_moe_cls_names`.
        """
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = os.environ.get(_PREFIX + "MOE_LAYER_CLS_NAMES")
        if self.transformer_moe_cls_names is None:
            return
        from deepspeed.utils import set_z3_leaf_modules

        classes = {type(part).__name__: type(part) for part in model.modules()}
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        unknown = [name for name in names if name not in classes]
        if unknown:
            raise ValueError(f"The model has no layer of class {', '.join(unknown)}: see `transformer_moe_cls_names`.")
        set_z3_leaf_modules(model, [classes[name] for name in names])


PLUGIN_SETTINGS: dict[str, _PluginSetting] = {
    each.name: each.metadata["setting"] for each in fields(DeepSpeedPlugin) if "setting" in each.metadata
}


def _check_asked_once() -> None:
    """Refuse settings that were given both to the launch and in a DeepSpeed file."""
    told = set(os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(","))
    twice = sorted(
        told & {name for name, setting in PLUGIN_SETTINGS.items() if setting.key} | told & {"mixed_precision"}
    )
    if twice:
        raise ValueError(
            f"The config of the launch says {', '.join(twice)}, and so does its deepspeed_config_file: "
            "leave them to the file, and write 'auto' there for what the script decides."
        )


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the plugin in use; of several, the one that is selected.

    Args:
        state: the `AcceleratorState`.

    Raises:
        ValueError: DeepSpeed is not used.
    """
    plugins = state.deepspeed_plugins
    if not plugins:
        raise ValueError("There is no active DeepSpeedPlugin: DeepSpeed is not the engine of this process.")
    if not isinstance(plugins, dict):
        return plugins
    return next(plugin for plugin in plugins.values() if plugin.selected)


class DummyOptim:
    """Stand in for the optimizer that a DeepSpeed config describes. Its values replace "auto" in the config.

    Args:
        params: the parameters or param groups to optimize.
        lr: the learning rate.
        weight_decay: the weight decay.
        **kwargs: accepted as in the 1.15 release.
    """

    _accelerate_kind = "optimizers"

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params) if isinstance(params, Iterator) else params  # to be read more than once
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stand in for the scheduler that a DeepSpeed config describes. Its values replace "auto" in the config.

    Args:
        optimizer: the optimizer, usually a `DummyOptim`.
        total_num_steps: the number of steps of the whole run.
        warmup_num_steps: the number of warmup steps.
        lr_scheduler_callable: given the optimizer, creates a scheduler to be used instead.
        **kwargs: accepted as in the 1.15 release.
    """

    _accelerate_kind = "schedulers"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
