"""FSDP version 1, `FullyShardedDataParallel`: the parameters of each part flattened into one, and cut into pieces."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
from torch.distributed.fsdp.wrap import CustomPolicy

from accelerate.checkpoint.full_state import Names, added, each_its_own
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.errors import CheckpointError
from accelerate.parallel import values
from accelerate.parallel.mesh import machines_mesh, sharding_mesh
from accelerate.parallel.shards import scale_down, total_norm
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Strategy
from accelerate.strategies.flat import Flat
from accelerate.strategies.sharded import Sharded, names_of_each
from accelerate.strategies.wrapping import average_gradients, compute_twice, ignored_modules, parts
from accelerate.torch_internals.compile import compiled_like, original_of
from accelerate.torch_internals.fsdp1 import exchanges, exchanging, give_mesh, is_hybrid, name_before
from accelerate.torch_internals.modules import parameters_of
from accelerate.unwrap import find_wrapper, unwrapped


class FSDP1(Sharded):
    takes_models_back = False  # torch leaves them unsharded

    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        self.plugin = state.fsdp_plugin
        self.mesh = sharding_mesh(None, None, state.device)
        self._flats: weakref.WeakSet[Flat] = weakref.WeakSet()

    # --- preparing ----------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, *, placed: bool) -> nn.Module:
        inner: Any = original_of(model)
        if isinstance(inner, Wrapper):  # whoever made it has wrapped it
            give_mesh(inner, self.mesh)
            flat = Flat(inner)
            self._note(inner, flat, flat.tied_names())
            return model
        if any(isinstance(module, Wrapper) for module in inner.modules()):
            raise ValueError(
                f"Parts of this {type(inner).__name__} are wrapped in FullyShardedDataParallel already, and the "
                "rest would not be synchronized between processes: wrap all of it, or nothing."
            )
        plugin: Any = self.plugin
        ignored = ignored_modules(plugin, inner)
        _refuse_scalars(inner, ignored)
        chosen = parts(plugin, inner, ignored)
        if plugin.activation_checkpointing:
            for part in chosen or [inner]:
                compute_twice(part)
        before = {
            (id(module), name): parameter
            for module in inner.modules()
            for name, parameter in parameters_of(module).items()
            if parameter is not None
        }
        tied_names = names_of_each(inner)
        fill = self._fill(inner, chosen)
        if isinstance(fill, values.Filling):
            for part in (part for root in ignored for part in root.modules()):
                fill(part)
        wrapped = Wrapper(
            inner,
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen) if chosen else None,
            ignored_modules=ignored or None,
            param_init_fn=fill,
            **self._settings(),
        )
        whole = dict.fromkeys(part for module in ignored for part in module.modules())
        for part in whole:
            for name, parameter in parameters_of(part).items():
                if parameter is not None:
                    self.moved.note(before[id(part), name], part, name)
        average_gradients({p for part in whole for p in part.parameters()}, lambda: exchanges(wrapped))
        self._note(wrapped, Flat(wrapped, before), tied_names)
        # What was compiled is so again, from outside: inside, it would have its name in all names of parameters.
        return wrapped if model is inner else compiled_like(model, wrapped)

    def _note(self, wrapped: Any, flat: Flat, tied_names: list[set[str]]) -> None:
        wrapped._accelerate_flat = flat
        wrapped._accelerate_same = tied_names
        self._flats.add(flat)

    @functools.cached_property
    def _hybrid_mesh(self) -> DeviceMesh | None:
        return machines_mesh(self.device, self.state.world.local_size)

    def _settings(self) -> dict[str, Any]:
        plugin: Any = self.plugin
        strategy = plugin._sharding
        on_cpu = self.device.type == "cpu"
        return {
            "sharding_strategy": strategy,
            "device_mesh": self._hybrid_mesh if is_hybrid(strategy) else self.mesh,
            # On the CPU they are where offloading would put them.
            "cpu_offload": CPUOffload(offload_params=False) if on_cpu else plugin.cpu_offload,
            "backward_prefetch": plugin.backward_prefetch,
            "mixed_precision": plugin.mixed_precision_policy,
            "device_id": self.device,
            "forward_prefetch": plugin.forward_prefetch,
            "limit_all_gathers": plugin.limit_all_gathers,
            "use_orig_params": plugin.use_orig_params,
        }

    def _fill(self, model: nn.Module, chosen: list[nn.Module]) -> Callable[[nn.Module], None] | None:
        """What gives modules their values while they are wrapped: those of rank 0, or made there by the plugin."""
        plugin = self.plugin
        if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
            values.copy_rank_0(model, self.device)  # quantized: they cannot be taken out and put back
            return None
        dtype = torch.float32 if plugin.mixed_precision_policy is not None else None
        kept = values.take(model, dtype, _flattened_with_trained([*chosen, model]))
        return values.Filling(model, kept, self.device, plugin.param_init_fn)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        super().rebind(optimizer)
        for flat in self._flats:
            flat.rebind(optimizer)

    def has_replaced(self, parameter: torch.Tensor) -> bool:
        return super().has_replaced(parameter) or any(flat.has_taken(parameter) for flat in self._flats)

    # --- stepping -----------------------------------------------------------------------------------------------

    def micro_batch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any] | None:
        wrapped = None if sync else find_wrapper(model, Wrapper)
        return None if wrapped is None else wrapped.no_sync()

    @classmethod
    def sync_in_backward(cls, model: nn.Module) -> AbstractContextManager[Any] | None:
        wrapped = find_wrapper(model, Wrapper)
        return None if wrapped is None else exchanging(wrapped)

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        gradients = {id(p.grad): p for p in parameters if p.grad is not None}
        # A piece is counted once; what is whole on every process is counted on the first one.
        counted = {gradient for gradient, parameter in gradients.items() if self._counts_piece(parameter)}
        own = [parameter.grad for parameter in gradients.values() if parameter.grad is not None]
        total = total_norm(own, float(norm_type), self.device, lambda gradient: id(gradient) in counted)
        scale_down(own, total, max_norm)
        self.note_norm(parameters, total)
        return total

    def _counts_piece(self, parameter: torch.Tensor) -> bool:
        for flat in self._flats:
            if (counts := flat.counts(parameter)) is not None:
                return counts
        return dist.get_rank() == 0

    # --- in the middle of a window ------------------------------------------------------------------------------

    def unreduced_gradients(self, models: list[nn.Module]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for number, flat in enumerate(map(_flat, models)):
            found |= {} if flat is None else _numbered(flat.unreduced_gradients(), number)
        whole = self._whole(models)
        return found | {name: p.grad.detach() for name, p in whole.items() if p.grad is not None}

    def reduced_gradients(self, models: list[nn.Module]) -> dict[str, Any] | None:
        parts = [None if (flat := _flat(model)) is None else flat.reduced_gradients() for model in models]
        if all(part is None for part in parts):
            return None
        return {name: g for number, part in enumerate(parts) for name, g in _numbered(part or {}, number).items()}

    def put_gradients(
        self, models: list[nn.Module], unreduced: dict[str, torch.Tensor], reduced: dict[str, torch.Tensor]
    ) -> None:
        policy: Any = self.plugin.mixed_precision_policy
        for number, flat in enumerate(map(_flat, models)):
            own, mean = _of(number, unreduced), _of(number, reduced)
            if flat is not None:
                flat.put_gradients(own, mean, None if policy is None else policy.param_dtype)
        for name, parameter in self._whole(models).items():
            parameter.grad = added(unreduced.get(name), reduced.get(name), parameter)

    def _whole(self, models: list[nn.Module]) -> dict[str, torch.Tensor]:
        """The parameters that are not sharded, by number and name."""
        found: dict[str, torch.Tensor] = {}
        for number, model in enumerate(models):
            flat = _flat(model)
            own = {name_before(name): parameter for name, parameter in unwrapped(model).named_parameters()}
            found |= _numbered({name: p for name, p in own.items() if flat is None or flat.counts(p) is None}, number)
        return found

    # --- saving -------------------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict on the first process; nothing on the others."""
        wrapped = find_wrapper(model, Wrapper)
        if wrapped is None:
            return Strategy.state_dict(self, model, unwrap=unwrap)  # it is whole, on every process
        with self._type(wrapped, StateDictType.FULL_STATE_DICT):
            state: dict[str, Any] = wrapped.state_dict()
        # With copies, the first process of each has one.
        return state if dist.get_rank() == 0 else {}

    def _pieces(self, wrapped: Any) -> AbstractContextManager[None]:
        """A context in which state dicts hold pieces; whole tensors, where every process has all."""
        kept_whole = wrapped.sharding_strategy == ShardingStrategy.NO_SHARD
        kind = StateDictType.FULL_STATE_DICT if kept_whole else StateDictType.SHARDED_STATE_DICT
        return self._type(wrapped, kind, rank0_only=False)

    @contextmanager
    def _type(self, wrapped: Any, kind: StateDictType, rank0_only: bool = True) -> Iterator[None]:
        """A context in which state dicts are whole, or in pieces."""
        # On the CPU torch would not copy them, and then take their memory away.
        moves = {"offload_to_cpu": self.device.type != "cpu"}
        configs: tuple[Any, Any] = (ShardedStateDictConfig(**moves), ShardedOptimStateDictConfig(**moves))
        if kind == StateDictType.FULL_STATE_DICT:
            moves["rank0_only"] = rank0_only
            configs = FullStateDictConfig(**moves), FullOptimStateDictConfig(**moves)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # there is nothing else for this engine
            # torch asks itself in an old way, and answers itself: the CPU's.
            warnings.filterwarnings("ignore", "`_get_pg_default_device` will be deprecated")
            warnings.filterwarnings("ignore", "Multiple backends are registered")
            with Wrapper.state_dict_type(wrapped, kind, *configs):
                yield

    def sharded_state_dict(self, model: nn.Module) -> dict[str, Any]:
        wrapped = find_wrapper(model, Wrapper)
        if wrapped is None:
            return super().sharded_state_dict(model)
        with self._pieces(wrapped):
            state: dict[str, Any] = wrapped.state_dict()
        return state

    def load_sharded_state_dict(self, model: nn.Module, pieces: dict[str, Any]) -> None:
        wrapped = find_wrapper(model, Wrapper)
        if wrapped is None:
            super().load_sharded_state_dict(model, pieces)
            return
        with self._pieces(wrapped):
            wrapped.load_state_dict({**wrapped.state_dict(), **pieces})

    def tied_names(self, model: nn.Module) -> list[set[str]]:
        wrapped = find_wrapper(model, Wrapper)
        return super().tied_names(model) if wrapped is None else wrapped._accelerate_same

    def names(self, models: list[nn.Module], optimizer: Any) -> Names:
        flat = self._flat_of(models, optimizer)[1]
        return [flat.names(group["params"]) for group in optimizer.param_groups]

    def _flat_of(self, models: list[nn.Module], optimizer: Any) -> tuple[Any, Flat]:
        """The model whose parameters an optimizer has."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        wrapped = filter(None, (find_wrapper(model, Wrapper) for model in models))
        owners = [w for w in wrapped if any(w._accelerate_flat.counts(p) is not None for p in own)]
        if len(owners) == 1:
            known = {id(parameter) for parameter in owners[0].parameters()}
            if not all(id(parameter) in known for parameter in own):
                raise CheckpointError(
                    "This optimizer has parameters that belong to no prepared model, which FSDP version 1 cannot "
                    "save: make them part of the model, or use version 2."
                )
            return owners[0], owners[0]._accelerate_flat
        raise CheckpointError(
            f"This optimizer has parameters of {len(owners)} prepared models, and FSDP version 1 can only save "
            "optimizers that belong to one model: give each model its own optimizer, or use version 2."
        )

    def sharded_optimizer_state_dict(self, models: list[nn.Module], optimizer: Any) -> dict[str, Any]:
        wrapped, _ = self._flat_of(models, optimizer)
        with self._pieces(wrapped):
            return each_its_own(Wrapper.optim_state_dict(wrapped, optimizer))

    def load_sharded_optimizer_state_dict(
        self, models: list[nn.Module], optimizer: Any, content: dict[str, Any]
    ) -> None:
        wrapped, _ = self._flat_of(models, optimizer)
        with self._pieces(wrapped):
            optimizer.load_state_dict(Wrapper.optim_state_dict_to_load(wrapped, optimizer, content))


def _refuse_scalars(model: nn.Module, ignored: list[nn.Module]) -> None:
    whole = {parameter for module in ignored for parameter in module.parameters()}
    names = [name for name, p in model.named_parameters() if not p.ndim and p not in whole]
    if names:
        raise ValueError(
            f"FSDP version 1 cannot shard parameters without a dimension ({', '.join(names)}): give them the shape "
            "(1,), or pass fsdp_version=2, which does not shard them."
        )


def _flattened_with_trained(units: list[nn.Module]) -> set[nn.Parameter]:
    """The parameters that become one with others which are trained, and so have to have their dtype.

    units: what is flattened, inner ones first.
    """
    found: set[nn.Parameter] = set()
    seen: set[nn.Parameter] = set()
    for unit in units:
        own = {parameter for parameter in unit.parameters() if parameter not in seen}
        seen |= own
        if any(parameter.requires_grad for parameter in own):
            found |= own
    return found


def _numbered(values: dict[str, Any], number: int) -> dict[str, Any]:
    return {f"{number}.{name}": value for name, value in values.items()}


def _of(number: int, values: dict[str, Any]) -> dict[str, Any]:
    prefix = f"{number}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _flat(model: nn.Module) -> Flat | None:
    wrapped = find_wrapper(model, Wrapper)
    return None if wrapped is None else wrapped._accelerate_flat
