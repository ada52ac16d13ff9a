"""Which parts of a model an engine treats one at a time, which it leaves alone, and which compute twice."""

from __future__ import annotations

import functools
import logging
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate.available import is_cuda_available
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.torch_internals.modules import parameters_of
from accelerate.torch_internals.wrap_policies import chosen_by

logger = logging.getLogger(__name__)


def ignored_modules(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[nn.Module]:
    """The parts of this model that are not sharded: as listed, or those whose names match an expression."""
    asked = plugin.ignored_modules
    if asked is None:
        return []
    listed: list[Any] = [asked] if isinstance(asked, (str, nn.Module)) else list(asked)
    plugin.ignored_modules = asked if isinstance(asked, str) else listed  # to be gone through for the next model, too
    own = set(model.modules())
    found = [module for module in listed if not isinstance(module, str) and module in own]
    expressions = [expression for expression in listed if isinstance(expression, str)]
    found += [module for expression in expressions for module in matching(expression, model)]
    if expressions and not found and not plugin._has_met_a_model:
        raise ValueError(
            f"ignored_modules is {asked!r}, which matches no module of this {type(model).__name__}: give a regular "
            "expression for full names, as in 'model.vision.*'."
        )
    return found


def matching(expression: str, model: nn.Module) -> list[nn.Module]:
    """The parts of a model whose whole name matches a regular expression."""
    return [module for name, module in model.named_modules() if name and re.fullmatch(expression, name)]


def parts(plugin: FullyShardedDataParallelPlugin, model: nn.Module, ignored: list[nn.Module]) -> list[nn.Module]:
    """The parts that the policy chooses, inner ones first; the model itself is not among them."""
    plugin.set_auto_wrap_policy(model)
    first, plugin._has_met_a_model = not plugin._has_met_a_model, True
    policy: Any = plugin.auto_wrap_policy
    left_alone = {id(module) for root in ignored for module in root.modules()}
    chosen: set[nn.Module] | None = set()
    if policy is not None:
        chosen = chosen_by(policy, model, ignored)
        if chosen is None:
            chosen = set()
            _choose(model, policy, left_alone, chosen)
    elif plugin._finds_blocks:
        chosen = {module for module in blocks_of(model) if id(module) not in left_alone}
    assert chosen is not None
    chosen.discard(model)
    chosen = {module for module in chosen if _owns_its_parameters(module, model)}
    if chosen and policy is None and first and PartialState().is_main_process:
        classes = " and ".join(sorted({type(module).__name__ for module in chosen}))
        logger.warning(
            f"No auto_wrap_policy was given, so FSDP gathers each {classes} of this {type(model).__name__} "
            "separately: name a policy to choose other modules, or 'no_wrap' to gather the whole model at once."
        )
    return [module for module in reversed(list(model.modules())) if module in chosen]


def blocks_of(model: nn.Module) -> set[nn.Module]:
    """The parts that are best gathered one at a time: what the model itself calls `_no_split_modules`, else the blocks
    that it repeats, where they are most of it."""
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    found = {part for part in model.modules() if type(part).__name__ in names}
    if not found:
        found = set(_repeated(model))
        size = sum(parameter.numel() for parameter in model.parameters())
        if 2 * sum(parameter.numel() for part in found for parameter in part.parameters()) < size:
            return set()
    return found


# Parts that some processes call and others do not, as their data wants it: each would wait for the other.
_CHOSEN_BY_DATA = re.compile("expert|head|branch|adapter|task")


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Blocks of several layers that come more than once in a row or a list; not those inside of such blocks."""
    listed = isinstance(module, (nn.ModuleList, nn.Sequential))
    counts = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        called = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        layers = any(parameters_of(part) for part in child.modules() if part is not child)
        if listed and called and layers and counts[type(child)] > 1:
            yield child
        elif not _CHOSEN_BY_DATA.search(name):
            yield from _repeated(child)


def _choose(module: nn.Module, policy: Callable[..., bool], ignored: set[int], chosen: set[nn.Module]) -> int:
    """Ask the policy, as FSDP does, whether to look inside, and then about what is left. Returns how much was taken."""
    if id(module) in ignored or isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return 0
    size = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=size):
        return 0
    taken = sum(_choose(child, policy, ignored, chosen) for child in module.children())
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # never called, so never gathered
        return taken
    if size > taken and policy(module=module, recurse=False, nonwrapped_numel=size - taken):
        chosen.add(module)
        return size
    return taken


def _owns_its_parameters(module: nn.Module, model: nn.Module) -> bool:
    """Whether no part outside has one of its parameters: shared ones have to be gathered together."""
    inside = set(module.modules())
    own = {id(parameter) for parameter in module.parameters()}
    outside = (p for other in model.modules() if other not in inside for p in parameters_of(other).values())
    return not any(id(parameter) in own for parameter in outside if parameter is not None)


def average_gradients(parameters: Iterable[nn.Parameter], syncing: Callable[[], bool]) -> None:
    """Keep parameters that are whole on every process the same there: no engine exchanges their gradients.

    syncing: asked after each backward, whether gradients are exchanged at it.
    """

    def average(parameter: torch.Tensor) -> None:
        if syncing() and parameter.grad is not None:
            # Divided by hand: gloo has learned to average only lately.
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)


def compute_twice(module: nn.Module, *, offload: bool = False) -> None:
    """Have a module keep only its inputs for the backward, and compute the rest again there.

    offload: keep the inputs on the host.
    """
    replace_forward(module, functools.partial(_checkpointed, offload=offload))


def replace_forward(module: nn.Module, made_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give a module a forward that is made of its own. A method stays one, so that a copy of the module runs itself."""
    original: Any = module.forward
    function = getattr(original, "__func__", None)
    module.forward = made_of(original) if function is None else types.MethodType(made_of(function), module)


def _checkpointed(forward: Callable[..., Any], offload: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        keeping = torch.autograd.graph.save_on_cpu(pin_memory=is_cuda_available()) if offload else nullcontext()
        with keeping:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed_forward
