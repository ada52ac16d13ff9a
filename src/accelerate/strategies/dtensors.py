"""What the engines share whose parameters are DTensors: they know themselves how they are spread."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.checkpoint.full_state import Names, added, parameter_names, to_indices, to_names
from accelerate.checkpoint.run_state import named_parameters, unwrapped
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.parallel.shards import complete, is_first_copy, local, scale_down, spread_as, total_norm, whole
from accelerate.state import AcceleratorState
from accelerate.strategies.rebind import Moved
from accelerate.strategies.sharded import Sharded
from accelerate.torch_internals.modules import parameters_of


class DTensors(Sharded):
    def __init__(self, state: AcceleratorState, ddp: DistributedDataParallelKwargs) -> None:
        super().__init__(state, ddp)
        self.moved = Moved()
        # The place of this process on the tensor axis, along which what is not split is the same.
        self.tensor_rank = 0

    def note_moved(self, before: dict[str, torch.Tensor], model: nn.Module) -> None:
        """Remember which parameter became which. before: those that the model had, by name."""
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, parameter in parameters_of(module).items():
                if parameter is not None:
                    self.moved.note(before[f"{prefix}.{name}" if prefix else name], module, name)

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        self.moved.rebind(optimizer)

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
                parameter.grad = complete(parameter.grad)
                gradients.append(parameter.grad)
        return gradients

    def waiting(self, models: list[nn.Module]) -> dict[str, torch.Tensor]:
        return {}

    def exchanged(self, models: list[nn.Module]) -> dict[str, Any] | None:
        parameters = named_parameters(models)
        self._complete(list(parameters.values()))
        return {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None} or None

    def put_gradients(
        self, models: list[nn.Module], waiting: dict[str, torch.Tensor], exchanged: dict[str, torch.Tensor]
    ) -> None:
        for name, parameter in named_parameters(models).items():
            gradient = added(waiting.get(name), exchanged.get(name), parameter)
            parameter.grad = None if gradient is None else spread_as(gradient, parameter)

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
                full = whole(value)
                value = full.cpu() if first else None
            if twin is not None:
                done[twin] = value
            if first:
                state[name] = value
        return state

    def names(self, models: list[nn.Module], optimizer: Any) -> Names:
        return parameter_names(models, optimizer)

    def optimizer_pieces(self, models: list[nn.Module], optimizer: Any) -> dict[str, Any]:
        return to_names(optimizer.state_dict(), self.names(models, optimizer))

    def put_optimizer_pieces(self, models: list[nn.Module], optimizer: Any, content: dict[str, Any]) -> None:
        optimizer.load_state_dict(to_indices(content, self.names(models, optimizer)))
