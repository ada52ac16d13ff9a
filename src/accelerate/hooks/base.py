"""Hooks: code that runs before and after the forward of a module, and may change what it gets and gives."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from accelerate.big_modeling.graphs import outside_graphs


class ModelHook:
    """What a hook may do. This one does nothing: override what you need.

    no_grad: run the forward of the module without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is put on a module. Returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before each forward. Returns the arguments that the forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after each forward. Returns what the caller gets."""
        return output

    def after_error(self, module: nn.Module) -> None:
        """Called instead of `post_forward` when the forward has raised an exception."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is taken off a module. Returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, each called in turn."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @outside_graphs
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for index, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                for before in self.hooks[:index]:
                    before.after_error(module)
                raise
        return args, kwargs

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    @outside_graphs
    def after_error(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.after_error(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put a hook on a module: its forward then runs between the hook's `pre_forward` and `post_forward`.

    A hook that is there already is replaced, or with `append=True` kept and run before the new one.
    """
    old_hook = getattr(module, "_hf_hook", None)
    old_forward: Any = module.forward
    hooked = hook.init_hook(module)
    if append and old_hook is not None:
        hook = SequentialHook(old_hook, hook)
    if getattr(hooked.forward, "__func__", None) is nn.Module.forward:  # a list of parameters, say, which never runs
        hooked._hf_hook = hook  # type: ignore[assignment]
        return hooked
    if not hasattr(hooked, "_old_forward"):
        hooked._old_forward = old_forward if hooked is module else hooked.forward  # type: ignore[assignment]
    module, old_forward = hooked, hooked._old_forward
    module._hf_hook = hook  # type: ignore[assignment]
    # A partial rather than a closure: a deep copy of the model then calls the copy's own modules.
    module.forward = functools.update_wrapper(functools.partial(_hooked_forward, module), old_forward)
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if torch.compiler.is_dynamo_compiling():  # which leaves out of its graphs what is in a `try`
        output = _forward(module, hook, args, kwargs)
    else:
        try:
            output = _forward(module, hook, args, kwargs) if hook.no_grad else module._old_forward(*args, **kwargs)
        except BaseException:
            hook.after_error(module)
            raise
    return hook.post_forward(module, output)


def _forward(module: Any, hook: ModelHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if hook.no_grad:
        with torch.no_grad():
            return module._old_forward(*args, **kwargs)
    return module._old_forward(*args, **kwargs)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off a module, if it has one; with `recurse=True` also off all modules inside."""
    if hasattr(module, "_hf_hook"):
        hook: Any = module._hf_hook
        hook.detach_hook(module)
        del module._hf_hook
    if hasattr(module, "_old_forward"):
        old: Any = module._old_forward
        if getattr(old, "__self__", None) is module and getattr(old, "__func__", None) is type(module).forward:
            del module.forward  # the class has it
        else:
            module.forward = old
        del module._old_forward
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and all modules inside."""
    remove_hook_from_module(module, recurse=True)
