"""How to compute in 8-bit floating point: one class of settings per library."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from accelerate.config.enums import FP8BackendType
from accelerate.config.environment import parse_flag_from_env, read_number
from accelerate.config.handlers import KwargsHandler

FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]
OptLevel = Literal["O1", "O2"]
Backend = Literal["MSAMP", "TE"]

_PREFIX = "ACCELERATE_FP8_"


def _choice(name: str, value: str, choices: Any) -> Any:
    if value not in get_args(choices):
        raise ValueError(f"`{name}` is {value!r}: choose one of {', '.join(get_args(choices))}.")
    return value


class Recipe(KwargsHandler):
    """How one library computes in fp8."""

    def library(self) -> FP8BackendType:
        """Return the library that the recipe is for."""
        raise NotImplementedError


@dataclass
class AORecipeKwargs(Recipe):
    """Compute in fp8 with torchao.

    Args:
        config: a `Float8LinearConfig`, or the name of a recipe ("tensorwise", "rowwise" or "rowwise_with_gw_hp"). By
            default the recipe named by `ACCELERATE_FP8_RECIPE`, or "tensorwise".
        module_filter_func: given a module and its name, tells whether it is converted.
        pad_inner_dim: with a recipe, pad layers whose sizes fp8 cannot multiply. By default as
            `ACCELERATE_FP8_PAD_INNER_DIM` says, or True.
        enable_fsdp_float8_all_gather: with the "tensorwise" recipe, gather FSDP parameters in fp8. By default as
            `ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER` says, or True.
    """

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        from accelerate.available import TORCHAO_RELEASE, is_torchao_available

        if not is_torchao_available():
            raise ImportError(
                f"AORecipeKwargs needs torchao {TORCHAO_RELEASE} or newer: install it with `pip install torchao`."
            )
        if self.config is None or isinstance(self.config, str):
            self._make_config(self.config or os.environ.get(_PREFIX + "RECIPE") or "tensorwise")

    def _make_config(self, recipe: str) -> None:
        from torchao.float8.config import Float8LinearConfig, Float8LinearRecipeName

        if not hasattr(Float8LinearConfig, "from_recipe_name"):
            from accelerate.available import TORCHAO_RELEASE

            raise ImportError(
                f"The recipes of torchao take release {TORCHAO_RELEASE} or newer, and an older one is installed: "
                "`pip install -U torchao`."
            )
        known = [each.value for each in Float8LinearRecipeName]
        if recipe not in known:
            raise ValueError(f"The recipe of torchao is {recipe!r}: choose one of {', '.join(known)}.")
        config = Float8LinearConfig.from_recipe_name(recipe)
        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
            if getattr(self, name) is None:
                setattr(self, name, parse_flag_from_env(_PREFIX + name.upper(), True))
        # Weights that are scaled row by row cannot be gathered in 8 bits.
        gathers = self.enable_fsdp_float8_all_gather and recipe == "tensorwise"
        self.enable_fsdp_float8_all_gather = gathers
        self.config = dataclasses.replace(
            config, pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=gathers
        )

    def library(self) -> FP8BackendType:
        return FP8BackendType.AO


@dataclass
class TERecipeKwargs(Recipe):
    """Compute in fp8 with TransformerEngine. Settings that are not given are read from `ACCELERATE_FP8_*` variables.

    Args:
        use_autocast_during_eval: compute in fp8 in evaluation as well.
        margin: the margin of the scaling factor; 0 by default.
        interval: after how many steps the scaling factor is computed again; 1 by default.
        fp8_format: "HYBRID" (default), "E4M3" or "E5M2".
        amax_history_len: how many steps the history of largest values has; 1024 by default.
        amax_compute_algo: "most_recent" (default) or "max" of that history.
        override_linear_precision: whether forward, gradient of inputs, and gradient of weights are left out of fp8.
        use_mxfp8_block_scaling: use the recipe with MXFP8 block scaling.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: FP8Format | None = None
    amax_history_len: int | None = None
    amax_compute_algo: AmaxComputeAlgorithm | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        from accelerate.available import is_transformer_engine_available

        if not is_transformer_engine_available():
            raise ImportError(f"{type(self).__name__} needs TransformerEngine: install it, or choose another backend.")
        for name in ("use_autocast_during_eval", "use_mxfp8_block_scaling"):
            if getattr(self, name) is None:
                setattr(self, name, parse_flag_from_env(_PREFIX + name.upper()))
        for name, default in (("margin", 0), ("interval", 1), ("amax_history_len", 1024)):
            if getattr(self, name) is None:
                setattr(self, name, read_number(_PREFIX + name.upper(), default))
        fp8_format: str = self.fp8_format or os.environ.get(_PREFIX + "FORMAT", "HYBRID")
        self.fp8_format = _choice("fp8_format", fp8_format.upper(), FP8Format)
        algorithm: str = self.amax_compute_algo or os.environ.get(_PREFIX + "AMAX_COMPUTE_ALGO", "most_recent")
        self.amax_compute_algo = _choice("amax_compute_algo", algorithm.lower(), AmaxComputeAlgorithm)
        if self.override_linear_precision is None:
            fprop, dgrad, wgrad = (parse_flag_from_env(f"{_PREFIX}OVERRIDE_{x}") for x in ("FPROP", "DGRAD", "WGRAD"))
            self.override_linear_precision = (fprop, dgrad, wgrad)

    def library(self) -> FP8BackendType:
        return FP8BackendType.TE


@dataclass
class MSAMPRecipeKwargs(Recipe):
    """Compute in fp8 with MS-AMP.

    Args:
        opt_level: "O1" for gradients in 8 bits, "O2" for optimizer states as well. By default
            `ACCELERATE_FP8_OPT_LEVEL`, or "O2".
    """

    opt_level: OptLevel | None = None

    def __post_init__(self) -> None:
        level: str = self.opt_level or os.environ.get(_PREFIX + "OPT_LEVEL", "O2")
        self.opt_level = _choice("opt_level", level, OptLevel)

    def library(self) -> FP8BackendType:
        return FP8BackendType.MSAMP


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Older form of `TERecipeKwargs` and `MSAMPRecipeKwargs`, whose settings it has. Use one of these instead.

    Args:
        backend: "TE" or "MSAMP". By default `ACCELERATE_FP8_BACKEND`, or "TE".
    """

    backend: Backend | None = None

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is the older form of TERecipeKwargs and MSAMPRecipeKwargs: pass one of these.",
            FutureWarning,
            stacklevel=3,
        )
        backend: str = self.backend or os.environ.get(_PREFIX + "BACKEND", "TE")
        self.backend = _choice("backend", backend.upper(), Backend)
        recipe = TERecipeKwargs if self.backend == "TE" else MSAMPRecipeKwargs
        recipe.__post_init__(self)

    def library(self) -> FP8BackendType:
        return FP8BackendType(self.backend)
