"""Questions about a module and its parts."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from accelerate.available import is_peft_available
from accelerate.unwrap import extract_model_from_parallel


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """List all modules of a model, children before their parents.

    Args:
        model: the model.
        return_fqns: return pairs of a module and its name.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)
        found.append((name, module))

    visit("", model)
    return found if return_fqns else [module for _, module in found]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class with a name among a module and its submodules, or None.

    Args:
        module: the module.
        name: the name of the class.
    """
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def model_has_dtensor(model: nn.Module) -> bool:
    """Tell whether a parameter of a model is a DTensor.

    Args:
        model: the model.
    """
    # Where nobody has imported them there are none, and importing them takes a second.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in model.parameters())


def get_model_tp_size(model: Any) -> int | None:
    """Return the tensor-parallel size that a model declares, or None.

    Args:
        model: the model.
    """
    size = getattr(model, "tp_size", None)
    return size if size is not None else getattr(model, "_tp_size", None)


def is_peft_model(model: Any) -> bool:
    """Tell whether a model, under its wrappers, is one of `peft`.

    Args:
        model: the model.
    """
    if not is_peft_available():
        return False
    peft = importlib.import_module("peft")
    return isinstance(extract_model_from_parallel(model), peft.PeftModel)
