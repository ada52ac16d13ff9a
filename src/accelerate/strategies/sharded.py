"""What the engines share that shard parameters: steps, and checkpoints in shards or as full state dicts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.checkpoint import layout
from accelerate.checkpoint.full_state import (
    Names,
    accepting,
    added,
    check_fit,
    check_kind,
    check_names,
    each_its_own,
    loads_as_torch,
    parameter_names,
    read_gradients,
    to_indices,
    to_names,
)
from accelerate.checkpoint.model_weights import Fetch
from accelerate.checkpoint.parts import File, Part
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.rollback import loads_by_own_code, restore_model, restore_optimizer
from accelerate.checkpoint.run_state import (
    Run,
    StagedLoad,
    fitting,
    named_parameters,
    past_undoing,
)
from accelerate.checkpoint.sharded_state import Shards, read
from accelerate.comm import current
from accelerate.comm.tree import recursively_apply
from accelerate.compilation import compile_regions_fsdp2
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.errors import CheckpointError
from accelerate.parallel.shards import complete, is_first_copy, local, scale_down, spread_as, total_norm, whole
from accelerate.precision.scaler import ShardedScaler
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Strategy
from accelerate.torch_internals.modules import parameters_of
from accelerate.unwrap import unwrapped


@dataclass
class _Norm:
    """The norm of some parameters' gradients. backwards: how many there had been by then."""

    total: torch.Tensor
    parameters: set[int]
    backwards: int


class Moved:
    """Where the parameter is that came in place of another. Holds on to neither."""

    def __init__(self) -> None:
        # By the module that has it: torch moves no parameter that somebody has a weak reference to.
        self._new: dict[int, tuple[weakref.ref[Any], weakref.ref[nn.Module], str]] = {}

    def note(self, old: torch.Tensor, module: nn.Module, name: str) -> None:
        if old is not parameters_of(module)[name]:
            self._new[id(old)] = weakref.ref(old), weakref.ref(module), name

    def new(self, parameter: torch.Tensor) -> torch.Tensor:
        old, owner, name = self._new.get(id(parameter), (None, None, ""))
        if old is None or owner is None or old() is not parameter:  # the number may be that of a later object
            return parameter
        module = owner()
        found = None if module is None else parameters_of(module).get(name)
        return parameter if found is None else found


class Sharded(Strategy):
    """Parameters are DTensors, which know themselves how they are spread. An engine with others overrides how the
    shards of a model, of an optimizer and of gradients are got and put back."""

    places_models = True
    needs_even_batches = True
    saves_alone = False
    scaler_kind = ShardedScaler
    # Whether a process can take back gradients that it alone has accumulated; else all get their mean.
    restores_unreduced = True
    # Whether a model can be put back when code of its own has failed in the middle of a load.
    takes_models_back = True
    plugin: FullyShardedDataParallelPlugin

    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        self.moved = Moved()
        # The place of this process on the tensor axis, along which what is not split is the same.
        self.tensor_rank = 0
        # Of the last clipping, once somebody asks whether gradients are finite.
        self._asks_for_norms = False
        self._norm: _Norm | None = None

    def note_moved(self, before: dict[str, torch.Tensor], model: nn.Module) -> None:
        """Remember which parameter became which. before: those that the model had, by name."""
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, parameter in parameters_of(module).items():
                if parameter is not None:
                    self.moved.note(before[f"{prefix}.{name}" if prefix else name], module, name)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        rebind(optimizer, self.moved.new)

    def has_replaced(self, parameter: torch.Tensor) -> bool:
        return self.moved.new(parameter) is not parameter

    def compile_regions(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return compile_regions_fsdp2(model, **kwargs)

    # --- stepping -----------------------------------------------------------------------------------------------

    def gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        for gradient in self._complete(parameters):
            local(gradient).clamp_(-clip_value, clip_value)

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        gradients = self._complete(parameters)
        total = total_norm(gradients, float(norm_type), self.device, self._counts)
        scale_down(gradients, total, max_norm)
        self.note_norm(parameters, total)
        return total

    def _counts(self, gradient: torch.Tensor) -> bool:
        """Whether this process counts its piece, of those that are the same."""
        # A mesh whose axes have no names is that of whoever split the model before it came here.
        split = isinstance(gradient, DTensor) and "tp" in (gradient.device_mesh.mesh_dim_names or ("tp",))
        return is_first_copy(gradient) and (split or self.tensor_rank == 0)

    def _complete(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        gradients = []
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = complete(parameter.grad)
                if gradient is not parameter.grad:
                    parameter.grad = gradient
                gradients.append(gradient)
        return gradients

    def nonfinite(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        self._asks_for_norms = True
        norm, wanted = self._norm, set(map(id, parameters))
        if norm is not None and norm.backwards == self.gradient_state.backwards and wanted <= norm.parameters:
            norm.parameters -= wanted  # for one step each
            return norm.total.isfinite().logical_not().float()
        own = super().nonfinite(parameters)
        # Each process sees its own pieces only, and may have none, so all have to ask each other. (A clipping has done
        # so, see above.) On the device of the engine, since pieces may lie on the host, which has another backend.
        flag = torch.zeros((), device=self.device) if own is None else own.to(self.device)
        return current().all_reduce(flag, "max")

    def note_norm(self, parameters: list[torch.Tensor], total: torch.Tensor) -> None:
        """Gradients were clipped by this norm, the same on all processes: it tells whether they were finite."""
        if self._asks_for_norms:
            self._norm = _Norm(total, set(map(id, parameters)), self.gradient_state.backwards)

    # --- shards -------------------------------------------------------------------------------------------------

    def sharded_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The state dict of a model, with tensors that know which piece this process has."""
        return unwrapped(model).state_dict()

    def load_sharded_state_dict(self, model: nn.Module, pieces: dict[str, Any]) -> None:
        unwrapped(model).load_state_dict(pieces, strict=False)

    def tied_names(self, model: nn.Module) -> list[set[str]]:
        """The names of each parameter of a model."""
        return names_of_each(unwrapped(model))

    def names(self, models: list[nn.Module], optimizer: Any) -> Names:
        """The names of an optimizer's parameters."""
        return parameter_names(models, optimizer)

    def sharded_optimizer_state_dict(self, models: list[nn.Module], optimizer: Any) -> dict[str, Any]:
        """The state dict of an optimizer, by the names of parameters, with pieces."""
        return to_names(optimizer.state_dict(), self.names(models, optimizer))

    def load_sharded_optimizer_state_dict(
        self, models: list[nn.Module], optimizer: Any, content: dict[str, Any]
    ) -> None:
        optimizer.load_state_dict(to_indices(content, self.names(models, optimizer)))

    # --- saving -------------------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict on the first process, put together tensor by tensor; nothing on the others."""
        model = unwrapped(model) if unwrap else model
        twins = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        first = dist.get_rank() == 0
        done: dict[int, Any] = {}
        state: dict[str, Any] = {}
        for name, value in model.state_dict().items():
            twin = twins.get(name)
            if twin in done:
                value = done[twin]
            elif isinstance(value, torch.Tensor):
                value = _gathered(value)
            if twin is not None:
                done[twin] = value
            if first:
                state[name] = value
        return state

    def stream_weights(self, model: nn.Module) -> tuple[dict[str, Any], Fetch] | None:
        pieces = self.sharded_state_dict(model)
        for names in self.tied_names(model):
            for twin in [name for name in pieces if name in names][1:]:
                del pieces[twin]

        def fetch(part: dict[str, Any], keep: bool) -> dict[str, Any]:
            found = {}
            for name in part:
                value = pieces[name]
                full = whole(value) if isinstance(value, torch.Tensor) else value
                if keep:
                    found[name] = full.cpu() if isinstance(full, torch.Tensor) else full
            return found

        return {name: _described(value) for name, value in pieces.items()}, fetch

    def weights(self, models: list[nn.Module]) -> list[dict[str, Any]]:
        return []

    def save(self, run: Run, weights: list[dict[str, Any]], *, safe: bool, main: bool, **kwargs: Any) -> Iterator[Part]:
        for number, model in enumerate(run.models):
            yield from self.model_parts(model, number, gathers=self.gathers)
        for number, optimizer in enumerate(run.optimizers):
            yield from self.optimizer_parts(run.models, optimizer, number, gathers=self.gathers)
        if run.gradients is not None:  # asked only for whether a window is open: the gradients are collected here
            reduced = self.reduced_gradients(run.models)
            if reduced is not None:
                yield Shards(layout.gradient_shards(), "gradients", reduced)
            yield File(layout.gradients(run.rank), self.unreduced_gradients(run.models), True)

    # In the middle of a window, by names as those of `named_parameters`:

    def unreduced_gradients(self, models: list[nn.Module]) -> dict[str, torch.Tensor]:
        """The gradients that this process has accumulated and not exchanged yet, as a whole."""
        return {}

    def reduced_gradients(self, models: list[nn.Module]) -> dict[str, Any] | None:
        """The gradients that are exchanged already, in pieces; None, on all processes, where there are none."""
        parameters = named_parameters(models)
        self._complete(list(parameters.values()))
        return {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None} or None

    def put_gradients(
        self, models: list[nn.Module], unreduced: dict[str, torch.Tensor], reduced: dict[str, torch.Tensor]
    ) -> None:
        """Have these gradients, and no others. reduced: as a whole, and the same on all processes."""
        for name, parameter in named_parameters(models).items():
            gradient = added(unreduced.get(name), reduced.get(name), parameter)
            parameter.grad = None if gradient is None else spread_as(gradient, parameter)

    @property
    def gathers(self) -> bool:
        """Whether checkpoints hold full state dicts, gathered on rank 0."""
        return gathers(self.plugin)

    def model_parts(
        self,
        model: nn.Module,
        number: int,
        *,
        gathers: bool,
        keep: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> Iterator[Part]:
        """The parts of a checkpoint for one model. keep: takes what is to be saved out of its state dict."""
        if not gathers:
            yield Shards(layout.model_shards(number), "model", keep(self.sharded_state_dict(model)))
            return
        content = self.state_dict(model)
        if dist.get_rank() == 0:
            yield File(layout.gathered_model(number), keep(content))

    def optimizer_parts(self, models: list[nn.Module], optimizer: Any, number: int, *, gathers: bool) -> Iterator[Part]:
        """The parts of a checkpoint for one optimizer."""
        content = self.sharded_optimizer_state_dict(models, optimizer)
        if not gathers:
            yield Shards(layout.optimizer_shards(number), "optimizer", content)
            return
        content = recursively_apply(_gathered, content)
        if dist.get_rank() == 0:
            yield File(layout.optimizer(number), content)

    # --- loading ------------------------------------------------------------------------------------------------

    def load(self, run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        strict = kwargs.get("strict", True)
        models = [self.read_model(model, reader, number, strict) for number, model in enumerate(run.models_to_load)]
        optimizers = [
            self.read_optimizer(run.models, optimizer, reader, number)
            for number, optimizer in enumerate(run.optimizers_to_load)
        ]
        unreduced, reduced = read_gradients(run, reader, alike=not self.restores_unreduced)

        def put() -> None:
            for model, pieces in zip(run.models_to_load, models, strict=True):
                with accepting(unwrapped(model), reader.folder):
                    self.load_sharded_state_dict(model, pieces)
            for number, (optimizer, content) in enumerate(zip(run.optimizers_to_load, optimizers, strict=True)):
                shards = layout.optimizer_shards(number)
                with fitting(optimizer, shards if reader.has(shards) else layout.optimizer(number)):
                    self.load_sharded_optimizer_state_dict(run.models, optimizer, content)

        # Found out now, for a hook may remove itself.
        model_fails = any(loads_by_own_code(unwrapped(one), except_for=_is_of_torch) for one in run.models_to_load)
        may_fail = model_fails or not all(map(loads_as_torch, run.optimizers_to_load))

        def apply_fallible(undo: ExitStack) -> None:
            if not may_fail:
                return
            if model_fails and not self.takes_models_back:
                with past_undoing(reader.folder):
                    put()
                return
            for model in run.models_to_load:
                restore_model(unwrapped(model), undo)
            for optimizer in run.optimizers_to_load:
                restore_optimizer(optimizer, undo)
            put()

        def apply_in_place() -> None:
            if not may_fail:
                put()
            self.put_gradients(run.models, unreduced, reduced)  # together, so not where one process has failed

        return StagedLoad(apply_in_place, apply_fallible)

    def read_model(
        self,
        model: nn.Module,
        reader: CheckpointReader,
        number: int,
        strict: bool = True,
        names: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """The pieces of a model, from whatever a checkpoint has of it; none of the model's is touched.

        names: where they are stored under other names, and only some of them: the name of each in the model.
        """
        everything = self.sharded_state_dict(model)
        own = everything if names is None else {stored: everything[name] for stored, name in names.items()}
        folder = layout.model_shards(number)
        if reader.has(folder):
            found = read(reader.folder / folder, lambda keys, size, dtype: _place(own.get(".".join(keys)), size, dtype))
        else:
            stored = reader.weights(_model_file(reader, number), {})
            found = {name: _cut(value, own.get(name)) for name, value in stored.items()}
        for twins in self.tied_names(model):  # one name may be all that was stored
            stored_as = next((name for name in twins if name in found), None)
            if stored_as is not None:
                found |= {name: found[stored_as] for name in twins if name not in found}
        check_fit(model, own, found, reader.folder, strict)
        return {(names or {}).get(name, name): value for name, value in found.items() if name in own}

    def read_optimizer(
        self, models: list[nn.Module], optimizer: Any, reader: CheckpointReader, number: int
    ) -> dict[str, Any]:
        """The pieces of an optimizer's state, by names, from whatever a checkpoint has of it."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners = [index for index, model in enumerate(models) if any(id(p) in own for p in model.parameters())]
        likes: dict[str, Any] = {}
        for index in owners:
            pieces = self.sharded_state_dict(models[index])
            likes |= {f"{index}.{name}": value for name, value in pieces.items()}
            if len(owners) == 1:
                likes |= pieces

        def like(keys: tuple[Any, ...]) -> Any:
            return likes.get(keys[1]) if keys[0] == "state" else None

        folder, names = layout.optimizer_shards(number), self.names(models, optimizer)
        if reader.has(folder):
            content = read(reader.folder / folder, lambda keys, size, dtype: _place(like(keys), size, dtype))
            _check_groups(optimizer, content, names, reader.folder / folder)
            return {"state": {}, **content}
        content = to_names(each_its_own(reader.content(layout.optimizer(number))), names)
        _check_groups(optimizer, content, names, reader.folder / layout.optimizer(number))
        state = {
            name: {key: _cut(value, likes.get(name)) for key, value in values.items()}
            for name, values in content["state"].items()
        }
        return {**content, "state": state}


def _check_groups(optimizer: Any, content: dict[str, Any], names: Names, path: Path) -> None:
    check_names(content["param_groups"], names)
    if loads_as_torch(optimizer):
        check_kind(optimizer, content["param_groups"], path)


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one that torch's own engines have put on a module."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.distributed.")


def rebind(optimizer: torch.optim.Optimizer, new_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give an optimizer other parameters, in the groups of the old ones, and with their state."""
    for group in optimizer.param_groups:
        group["params"][:] = [new_of(parameter) for parameter in group["params"]]
    for old in list(optimizer.state):
        new = new_of(old) if isinstance(old, torch.Tensor) else old
        if new is not old:
            optimizer.state[new] = {name: _kept(value, new) for name, value in optimizer.state.pop(old).items()}


def _kept(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
        return spread_as(value, parameter)
    return value


def names_of_each(model: nn.Module) -> list[set[str]]:
    """The names of each parameter of a model that has its own."""
    found: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    return list(found.values())


def gathers(plugin: FullyShardedDataParallelPlugin) -> bool:
    """Whether checkpoints hold full state dicts, gathered on rank 0."""
    return "FULL_STATE_DICT" in str(plugin.state_dict_type)


def _gathered(tensor: torch.Tensor) -> torch.Tensor | None:
    """The full tensor, on rank 0."""
    full = whole(tensor)
    return full.cpu() if dist.get_rank() == 0 else None


def _described(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _place(like: Any, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(like, torch.Tensor) and like.shape == size:
        return torch.empty_like(like, dtype=dtype)
    return torch.empty(size, dtype=dtype)


def _cut(value: Any, like: Any) -> Any:
    """A stored tensor, of which this process needs a piece."""
    if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor) and value.shape == like.shape:
        return spread_as(value, like)
    return value


def _model_file(reader: CheckpointReader, number: int) -> str:
    names = [layout.gathered_model(number), layout.model(number, True), layout.model(number, False)]
    found = next(filter(reader.has, names), None)
    if found is None:
        raise CheckpointError(
            f"{reader.folder} has no model number {number} (neither the folder {layout.model_shards(number)} nor any "
            f"of {', '.join(names)}): load a checkpoint of a run that had at least as many models."
        )
    return found
