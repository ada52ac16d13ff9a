"""nn.Module: the tables of its parameters, buffers and children, and who takes part in loading a state dict."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from typing import Any

import torch
from torch import nn

from accelerate.torch_internals.compile import ADDED_TO_NAMES
from accelerate.torch_internals.missing import gone

# What FSDP version 1 puts between the names of modules, and leaves out of state dicts.
BETWEEN_NAMES = "_fsdp_wrapped_module"


def name_without_wrappers(name: str) -> str:
    """The name of a module or parameter as it was before torch wrapped the model; a longer one if torch uses others."""
    return ".".join(part for part in name.split(".") if part not in (*ADDED_TO_NAMES, BETWEEN_NAMES))


def parameters_of(module: nn.Module) -> MutableMapping[str, nn.Parameter | None]:
    """The parameters of a module itself, by name: also those that are None, and one with two names twice.

    Writing to it replaces a parameter without the checks and hooks of `register_parameter`. Without torch's table it is
    a view by the public API: slower, and without those that are None.
    """
    try:
        return module._parameters
    except AttributeError:
        return _Table(module, lambda: module.named_parameters(recurse=False, remove_duplicate=False))


def buffers_of(module: nn.Module) -> MutableMapping[str, torch.Tensor | None]:
    """The buffers of a module itself, by name; see `parameters_of`."""
    try:
        return module._buffers
    except AttributeError:
        return _Table(module, lambda: module.named_buffers(recurse=False, remove_duplicate=False))


def children_of(module: nn.Module) -> MutableMapping[str, nn.Module | None]:
    """The modules right inside a module, by name; see `parameters_of`."""
    try:
        return module._modules
    except AttributeError:
        return _Table(module, lambda: _named_children(module))


def _named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `named_children`, which gives a module that has two names only once."""
    inside = module.named_modules(remove_duplicate=False)
    return ((name, child) for name, child in inside if name and "." not in name)


class _Table(MutableMapping[str, Any]):
    """What a module has, read and written by the public API."""

    def __init__(self, module: nn.Module, named: Callable[[], Iterator[tuple[str, Any]]]) -> None:
        self._module = module
        self._named = named

    def __getitem__(self, name: str) -> Any:
        return dict(self._named())[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._module, name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._named()))

    def __len__(self) -> int:
        return len(dict(self._named()))


def non_persistent_buffers(module: nn.Module) -> Set[str]:
    """The names of the buffers of a module itself that its state dict leaves out.

    Without torch's set it is found by making a state dict, which is slower, and runs the hooks of the module.
    """
    try:
        return module._non_persistent_buffers_set
    except AttributeError:
        return set(buffers_of(module)) - set(module.state_dict(keep_vars=True))


def with_own_children(module: nn.Module) -> nn.Module:
    """A copy of a module that shares all with it but the table of its children.

    Without torch's name for the table, all that is no tensor and no module is copied.
    """
    if "_modules" not in module.__dict__:
        shared = [*module.parameters(), *module.buffers(), *module.children()]
        return copy.deepcopy(module, {id(part): part for part in shared})
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    for name, value in module.__dict__.items():
        # A forward that was put on the instance would go on to run the original's children.
        if isinstance(value, types.MethodType) and value.__self__ is module:
            twin.__dict__[name] = types.MethodType(value.__func__, twin)
    return twin


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put what a function makes of it in place of every parameter and buffer, as `to` does; engines hear of it.

    Without `nn.Module._apply` models cannot be given memory for their pieces: sharding and tensor parallelism are lost.
    """
    apply: Any = getattr(module, "_apply", None)
    if apply is None:
        raise gone(
            "nn.Module._apply", "spreading a model over processes", "install a release of torch that accelerate knows"
        )
    apply(function)


# --- loading a state dict -------------------------------------------------------------------------------------------

# The end of the key under which a state dict has what `get_extra_state` returned; written in every file, so it stays.
EXTRA_STATE = "_extra_state"


# Tells the hooks that do not count.
FindHook = Callable[[Callable[..., Any]], bool]


def has_pre_load_hooks(module: nn.Module, except_for: FindHook | None = None) -> bool:
    """Whether hooks of a module change what `load_state_dict` is given. except_for: tells those that do not count.

    Without torch's table of them every module counts as one with hooks: what it loads is not checked before.
    """
    try:
        hooks: list[Any] = list(module._load_state_dict_pre_hooks.values())
        return any(except_for is None or not except_for(hook.hook) for hook in hooks)
    except AttributeError:
        return True


def has_post_load_hooks(module: nn.Module, except_for: FindHook | None = None) -> bool:
    """Whether hooks of a module run after `load_state_dict`; every module counts as one with, without torch's table."""
    try:
        return any(except_for is None or not except_for(hook) for hook in module._load_state_dict_post_hooks.values())
    except AttributeError:
        return True


def loads_by_code_of(module: nn.Module) -> str:
    """The name of the Python module whose code takes a module's own tensors out of a state dict.

    Empty where torch does not tell: then the module is loaded as one that has code of its own for it.
    """
    code: Any = getattr(module, "_load_from_state_dict", None)
    return "" if code is None else str(code.__module__)


def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
    """What `load_state_dict` does for a model whose parts have neither hooks nor a `load_state_dict` of their own.

    torch looks through all names of a module once for each of its children, which takes hours where it has many. Here
    the names are looked through once. Without torch's name for taking a module's own tensors, torch does it all.
    """
    if not hasattr(module, "_load_from_state_dict"):
        module.load_state_dict(state, strict=strict, assign=assign)
        return
    metadata = getattr(state, "_metadata", None) or {}
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []

    def load(part: nn.Module, names: dict[str, Any], prefix: str) -> None:
        about = dict(metadata.get(prefix[:-1], {}))
        if assign:
            about["assign_to_params_buffers"] = True
        part._load_from_state_dict(names, prefix, about, True, missing, unexpected, errors)
        children = children_of(part)
        inside: dict[str, dict[str, Any]] = {name: {} for name in children}
        for name, value in names.items():
            child, dot, _ = name[len(prefix) :].partition(".")
            if dot and child in inside and name.startswith(prefix):
                inside[child][name] = value
        for name, child_module in children.items():
            if child_module is not None:
                load(child_module, inside.pop(name), f"{prefix}{name}.")

    load(module, dict(state), "")
    if strict:
        errors[:0] = [f"{kind} {names}" for kind, names in (("missing", missing), ("unknown", unexpected)) if names]
    if errors:
        raise RuntimeError(f"{type(module).__name__} does not take the state dict: {'; '.join(errors)}")


def registration_hooks() -> Mapping[Any, Any]:
    """The hooks that are called for every parameter that is registered, in any module; it changes as they do.

    One that nobody has registered, which costs time where modules are made, where torch does not tell.
    """
    try:
        return nn.modules.module._global_parameter_registration_hooks
    except AttributeError:
        return {"unknown": None}


def metadata_of(state: Any) -> dict[str, Any]:
    """What `state_dict` noted beside the tensors, as versions of modules; nothing where torch keeps it elsewhere."""
    return dict(getattr(state, "_metadata", None) or {})


def set_metadata(state: Any, metadata: dict[str, Any]) -> None:
    """Note beside the tensors of a state dict what `metadata_of` gave, so that modules know of their older versions."""
    state._metadata = metadata


def refresh_flat_weights(module: nn.RNNBase) -> None:
    """Have an RNN use the tensors that it has now: it keeps a list of them besides.

    Without `_update_flat_weights` each weight is assigned to itself, which RNNs notice.
    """
    update: Any = getattr(module, "_update_flat_weights", None)
    if update is not None:
        update()
        return
    for name, weight in list(parameters_of(module).items()):
        setattr(module, name, weight)


def is_new_name(module: nn.Module, name: str) -> bool:
    """Whether a module is set up and has neither a parameter nor a buffer nor a child of this name.

    False where torch keeps its tables elsewhere: an attribute of that name is then set by the long way.
    """
    own = module.__dict__
    try:
        return name not in own["_parameters"] and name not in own["_buffers"] and name not in own["_modules"]
    except KeyError:
        return False


def add_pre_load_hook(module: nn.Module, hook: Callable[..., None]) -> Any:
    """Have a hook called before a module takes its tensors out of a state dict; returns a handle that removes it.

    By the method of the base class, which works on modules of TorchScript as well; the public one refuses these.
    """
    register: Any = getattr(nn.Module, "_register_load_state_dict_pre_hook", None)
    if register is not None:
        return register(module, hook, with_module=True)
    return module.register_load_state_dict_pre_hook(hook)
