"""fp8 with torchao: which linear layers are converted, converting them, and gathering their weights in 8 bits."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.available import TORCHAO_RELEASE, is_torchao_available, torchao_required
from accelerate.bundle import Bundle
from accelerate.config.enums import FP8BackendType
from accelerate.config.fp8 import AORecipeKwargs
from accelerate.devices import Device
from accelerate.precision.base import PrecisionSettings
from accelerate.precision.fp8 import PIECE, Fp8, logger
from accelerate.torch_internals.compile import original_of
from accelerate.torch_internals.mesh import held_piece
from accelerate.torch_internals.modules import parameters_of

_GATHERS = "_accelerate_gathers_fp8"
# What a weight that is gathered in 8 bits has, by torchao's names: itself as a plain tensor, and its scale if known.
_PLAIN, _SCALE = "_tensor", "_precomputed_scale"


class TorchAO(Fp8):
    fp8_backend = FP8BackendType.AO
    title = package = "torchao"
    recipe_kind = AORecipeKwargs
    recipe: AORecipeKwargs

    def __init__(self, device: Device, settings: PrecisionSettings) -> None:
        super().__init__(device, settings)
        config: Any = self.recipe.config
        # Weights get the class that is gathered in 8 bits when they are sharded, and only then: so one device and DDP
        # train the very parameters that the script has made its optimizer for.
        self._gathers = bool(config.enable_fsdp_float8_all_gather)
        emulate = config.emulate or device.name == "cpu"
        self.config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False, emulate=emulate)
        if emulate:
            logger.warning_once(
                "fp8 is emulated: numbers are rounded as on a GPU that computes in 8 bits, and nothing is faster."
            )

    @classmethod
    def lacks(cls, device: Device) -> str | None:
        if not is_torchao_available():
            return f"it is not installed (`pip install torchao`, {TORCHAO_RELEASE} or newer)"
        why = device.lacks_fp8()
        if why is not None:
            return why
        try:
            _try_names()
        except Exception as error:  # of whatever it misses in this torch
            version = importlib.metadata.version(cls.package)
            return (
                f"torchao {version} does not work with torch {torch.__version__} ({error}; it needs "
                f"{TORCHAO_RELEASE} or newer)"
            )
        return None

    def convert(self, bundle: Bundle) -> None:
        for entry in bundle.models:
            if not entry.evaluation:
                self._convert_layers(original_of(entry.value))
        super().convert(bundle)

    def _convert_layers(self, model: nn.Module) -> None:
        """Make linear layers those of torchao: the same objects, with their parameters and all that is attached."""
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        layers = {name: module for name, module in linear.items() if not isinstance(module, Float8Linear)}
        verdicts = self._verdicts(model, layers)
        tables = vars(nn.Identity())
        for name, layer in layers.items():
            if verdicts[name] is None:
                new = convert_to_float8_training(layer, config=self.config)
                vars(layer).update({key: value for key, value in vars(new).items() if key not in tables})
                layer.__class__ = type(new)
        _tell(type(model).__name__, len(linear), Counter(why for why in verdicts.values() if why is not None))

    def _verdicts(self, model: nn.Module, layers: dict[str, nn.Linear]) -> dict[str, str | None]:
        """Why each linear layer is left alone; None for those that are converted."""
        choose = self.recipe.module_filter_func
        ends = find_first_last_linear_layers(model)
        verdicts: dict[str, str | None] = {}
        for name, layer in layers.items():
            # A layer with a forward of its own, or a weight that is computed, would lose them.
            plain = type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)
            if choose is not None and not choose(layer, name):
                verdicts[name] = "those that the filter leaves out"
            elif choose is None and name in ends:
                verdicts[name] = "the first and the last"
            elif not plain or parameters_of(layer).get("weight") is None:
                verdicts[name] = "those with a forward or a computed weight of their own"
            elif layer.in_features % PIECE or layer.out_features % PIECE:
                verdicts[name] = f"those whose sizes are not multiples of {PIECE}"
            else:
                verdicts[name] = None
        return verdicts

    def before_sharding(self, model: nn.Module, left_out: Collection[nn.Module]) -> None:
        if not self._gathers:
            return
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        whole = {part for module in left_out for part in module.modules()}
        owners = Counter(id(p) for module in model.modules() for p in parameters_of(module).values())
        for module in model.modules():
            if not isinstance(module, Float8Linear) or module in whole or owners[id(module.weight)] > 1:
                continue
            weight: Any = module.weight
            gathered: Any = WeightWithDynamicFloat8CastTensor(
                weight, module.linear_mm_config, module.config.cast_config_weight.target_dtype
            )
            module.weight = nn.Parameter(gathered, requires_grad=weight.requires_grad)
            module.register_state_dict_post_hook(_plain_weight)
            module.register_load_state_dict_post_hook(_forget_scale)
            setattr(model, _GATHERS, True)
            self.acts_after_step = True

    def after_step(self, models: list[nn.Module]) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for model in models:
            inner = original_of(model)
            if getattr(inner, _GATHERS, False):
                precompute_float8_dynamic_scale_for_fsdp(inner)  # with one message for all weights


def _try_names() -> None:
    """Raise where this torchao lacks any of what is used of it."""
    from torchao.float8 import convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp  # noqa: F401
    from torchao.float8.config import Float8LinearConfig, Float8LinearRecipeName  # noqa: F401
    from torchao.float8.float8_linear import Float8Linear  # noqa: F401
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor  # noqa: F401

    _ = Float8LinearConfig.from_recipe_name


def _tell(name: str, count: int, reasons: Counter[str]) -> None:
    converted = count - reasons.total()
    left = ", ".join(f"{why} ({number})" for why, number in reasons.items())
    line = f"{converted} of the {count} linear layers of {name} compute in fp8."
    line += f" Left alone: {left}." if left else ""
    unexpected = not converted or any("multiples" in why for why in reasons)
    (logger.warning if unexpected else logger.info)(line)


def _plain_weight(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State dicts have weights as those of any other layer: checkpoints are read, and written, without torchao."""
    from torch.distributed.tensor import DTensor

    name = f"{prefix}weight"
    value: Any = state.get(name)
    spread = isinstance(value, DTensor)
    plain = getattr(value.to_local() if spread else value, _PLAIN, None)
    if plain is None:
        return
    if spread:
        plain = DTensor.from_local(
            plain,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    state[name] = plain


def _forget_scale(module: Any, problems: Any) -> None:
    """Other weights have another scale, which is found when they are gathered, or else after the next step."""
    piece = held_piece(module.weight)
    if piece is not None:
        setattr(piece, _SCALE, None)


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer, which suffer most from fp8.

    Args:
        model: the model.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Tell whether a module can be converted to fp8.

    Args:
        module: the module.
        fqn: its name in the model.
        layers_to_filter: names of layers that are left out.

    Returns:
        True if its sizes suit fp8 and it is not left out.
    """
    if isinstance(module, nn.Linear) and (module.in_features % PIECE or module.out_features % PIECE):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Tell whether a layer can be converted to fp8 and is neither the first nor the last linear layer.

    Args:
        module: the whole model.
        fqn: the name of the layer.
    """
    first, last = find_first_last_linear_layers(module)
    return filter_linear_layers(module, fqn, [name for name in (first, last) if name is not None])


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Tell whether a layer of a model was converted to fp8 by torchao.

    Args:
        model: the model.
    """
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Convert the linear layers of a model to fp8 with torchao, in place.

    Args:
        model: the model.
        config: torchao's `Float8LinearConfig`.
        module_filter_func: given a module and its name, tells whether it is converted. By default all layers whose
            sizes suit, except the first and the last.
    """
    from torchao.float8 import convert_to_float8_training

    if module_filter_func is None:
        ends = [name for name in find_first_last_linear_layers(model) if name is not None]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=ends)
    convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)
