"""Hooks: code that runs before and after the forward of a module, and may change what it gets and gives."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from accelerate.torch_internals.compile import outside_graphs


class ModelHook:
    """Run code before and after the forward of a module. This base class changes nothing: override what you need.

    Attributes:
        no_grad: run the forward without gradients.

    Example:
        ```python
        class Double(ModelHook):
            def post_forward(self, module, output):
                return 2 * output

        add_hook_to_module(model.head, Double())
        ```
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module that the hook is added to.

        Args:
            module: the module.

        Returns:
            The module.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before each forward.

        Args:
            module: the module.
            *args: positional arguments of the forward.
            **kwargs: keyword arguments of the forward.

        Returns:
            The positional and keyword arguments that the forward gets.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after each forward.

        Args:
            module: the module.
            output: what the forward returned.

        Returns:
            What the caller gets.
        """
        return output

    def after_error(self, module: nn.Module) -> None:
        """Run instead of `post_forward` if the forward raises an exception.

        Args:
            module: the module.
        """

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` on a module that the hook is removed from.

        Args:
            module: the module.

        Returns:
            The module.
        """
        return module


class SequentialHook(ModelHook):
    """Run several hooks as one, in their order.

    Args:
        *hooks: the hooks.
    """

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
    """Add a hook to a module: its forward then runs between the hook's `pre_forward` and `post_forward`.

    Args:
        module: the module.
        hook: the hook.
        append: keep a hook that the module already has, and run it before the new one. Otherwise it is replaced.

    Returns:
        The module.
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
    """Remove the hook of a module, if it has one.

    Args:
        module: the module.
        recurse: remove the hooks of all submodules as well.

    Returns:
        The module.
    """
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
    """Remove the hooks of a module and all its submodules.

    Args:
        module: the module.
    """
    remove_hook_from_module(module, recurse=True)
