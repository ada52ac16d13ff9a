"""Which parts of a model FSDP gathers at a time: one class for each policy that has a name."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from accelerate.config.environment import read_number

if TYPE_CHECKING:
    from torch import nn


class WrapPolicy:
    """All of a model at once."""

    # The function of `torch.distributed.fsdp.wrap` that stands for the policy until the model is known.
    function: str | None = None

    def torch_function(self) -> Any:
        from torch.distributed.fsdp import wrap

        return None if self.function is None else getattr(wrap, self.function)

    def is_kind_of(self, policy: Any) -> bool:
        """Whether a function stands for this policy, or was made by it for another model."""
        return policy == self.torch_function() or getattr(policy, "made_by", None) is self

    def made(self, **settings: Any) -> Any:
        policy = functools.partial(self.torch_function(), **settings)
        setattr(policy, "made_by", self)  # noqa: B010
        return policy

    def read_variables(self, plugin: Any) -> None:
        """Fill in what the policy needs and the plugin was not given."""

    def of_model(self, plugin: Any, model: nn.Module) -> Any:
        """The policy for this model; None to gather all of it at once."""
        return None


class TransformerBased(WrapPolicy):
    """The layers of these classes, each by itself."""

    function = "transformer_auto_wrap_policy"

    def read_variables(self, plugin: Any) -> None:
        names = plugin.transformer_cls_names_to_wrap
        if names is None:
            names = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        plugin.transformer_cls_names_to_wrap = names

    def of_model(self, plugin: Any, model: nn.Module) -> Any:
        asked = plugin.transformer_cls_names_to_wrap
        # A class of models may name layers that not all of them have.
        names = list(getattr(model, "_no_split_modules", None) or []) if asked is None else asked
        classes = {type(part).__name__: type(part) for part in model.modules()}
        unknown = [name for name in names if name not in classes]
        if unknown and asked is not None and not plugin._has_met_a_model:
            raise ValueError(
                f"transformer_cls_names_to_wrap names {', '.join(unknown)}, but this {type(model).__name__} has no "
                f"module of that class: its modules are {', '.join(sorted(classes))}."
            )
        return self.made(transformer_layer_cls={classes[name] for name in names if name in classes})


def min_num_params() -> int:
    """What the environment says of the smallest part that is gathered by itself; 0 for nothing."""
    return read_number("FSDP_MIN_NUM_PARAMS", 0)


class SizeBased(WrapPolicy):
    """Parts with at least so many parameters."""

    function = "size_based_auto_wrap_policy"

    def read_variables(self, plugin: Any) -> None:
        if plugin.min_num_params is None:
            plugin.min_num_params = min_num_params()
        elif not isinstance(plugin.min_num_params, int):
            raise ValueError(f"min_num_params is {plugin.min_num_params!r}: pass a number of parameters.")

    def of_model(self, plugin: Any, model: nn.Module) -> Any:
        if not plugin.min_num_params:
            return None
        return self.made(min_num_params=plugin.min_num_params)


POLICIES: dict[str, WrapPolicy] = {
    "TRANSFORMER_BASED_WRAP": TransformerBased(),
    "SIZE_BASED_WRAP": SizeBased(),
    "NO_WRAP": WrapPolicy(),
}
