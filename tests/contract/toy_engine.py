"""An engine that takes everything over: preparing, precision, backward, accumulation, steps, data, checkpoint files.

It is slow and does nothing that DDP does not do better. It shows that an engine is one file and one line in the table,
and has the contract suite run against everything that an engine may own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate.bundle import Bundle
from accelerate.checkpoint.parts import File, Part
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import Run, StagedLoad
from accelerate.comm import current
from accelerate.comm.tree import convert_to_fp32
from accelerate.io.safe_load import read_torch
from accelerate.precision.stepping import Stepper
from accelerate.strategies import Outputs, Strategy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 256.0  # of fp16


class ToyModule(nn.Module):
    """What a script gets for its model: computes in the engine's precision."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            outputs = self.module(*args, **kwargs)
        return convert_to_fp32(outputs)


class ToyOptimizer:
    """Stands for an optimizer that the engine makes itself, once it has the model."""

    _accelerate_kind = "optimizers"

    def __init__(self, lr: float) -> None:
        self.lr = lr


class ToyLoader:
    """Stands for a loader that the engine makes itself."""

    _accelerate_kind = "loaders"

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def make(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=2)


class ToyEngine(Stepper):
    """The gradients of one optimizer, in double precision, and its steps."""

    def __init__(self, optimizer: Any, loss_scale: float) -> None:
        super().__init__(optimizer)
        self.loss_scale = loss_scale
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._overflow = False
        self.clear()

    def clear(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}
        self.micro_batches = 0
        self.exchanged = False

    def take(self, *, divide: bool) -> None:
        """After a backward: the gradients of one more micro-batch."""
        found = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        for parameter, gradient in found:
            own = gradient.double() / self.loss_scale
            self.sums[id(parameter)] = self.sums[id(parameter)] + own if id(parameter) in self.sums else own
            parameter.grad = None
        self.micro_batches += bool(found and divide)

    def exchange(self) -> None:
        """At the end of a window, once: the mean over micro-batches and processes becomes the gradient."""
        if self.exchanged or not self.sums:
            return
        self.exchanged = True
        communicator = current()
        for parameter in self.parameters:
            total = self.sums.get(id(parameter))
            total = torch.zeros_like(parameter, dtype=torch.float64) if total is None else total
            mean = communicator.all_reduce(total / max(self.micro_batches, 1)) / communicator.size
            parameter.grad = mean.to(parameter.dtype)

    def step(self, closure: Callable[[], Any] | None = None, *, last: bool = True) -> Any:
        if not last:
            return None
        self.exchange()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self._overflow = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        return None if self._overflow else super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None, *, last: bool = True) -> None:
        if last:
            super().zero_grad(set_to_none)
            self.clear()

    @property
    def skipped(self) -> bool:
        return self._overflow

    def window(self) -> dict[str, Any]:
        """What was accumulated and not stepped with, to be saved."""
        sums = {number: self.sums[id(p)] for number, p in enumerate(self.parameters) if id(p) in self.sums}
        return {"sums": sums, "micro_batches": self.micro_batches}

    def load_window(self, window: dict[str, Any]) -> None:
        self.clear()
        self.sums = {id(self.parameters[number]): total for number, total in window["sums"].items()}
        self.micro_batches = window["micro_batches"]

    def for_other(self, optimizer: Any) -> ToyEngine:
        return type(self)(optimizer, self.loss_scale)


class Toy(Strategy):
    owns_precision = True
    owns_accumulation = True
    divides_loss = True
    saves_alone = False
    can_copy_aside = False
    wrappers = (ToyModule,)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.engines: dict[int, ToyEngine] = {}  # by optimizer
        self.models: list[tuple[nn.Module, bool]] = []  # of the micro-batch

    # --- preparing ----------------------------------------------------------------------------------------------

    def prepare(self, bundle: Bundle) -> None:
        for optimizer in bundle.optimizers:
            if isinstance(optimizer.value, ToyOptimizer):
                if not bundle.models:
                    raise ValueError("ToyOptimizer is made from a model: pass both to one call of `prepare`.")
                parameters = [p for model in bundle.models for p in model.value.parameters()]
                optimizer.value = torch.optim.SGD(parameters, lr=optimizer.value.lr)
            scale = LOSS_SCALE if self.state.mixed_precision == "fp16" else 1.0
            self.engines[id(optimizer.value)] = ToyEngine(optimizer.value, scale)
        for model in bundle.models:
            if not model.evaluation:
                current().broadcast_objects([None])  # engines talk while they prepare: all ranks come here alike
                model.value = ToyModule(model.value, DTYPES.get(self.state.mixed_precision))

    def loader(self, loader: Any, prepare: Callable[[Any], Any]) -> Any:
        return prepare(loader.make() if isinstance(loader, ToyLoader) else loader)

    def stepper(self, optimizer: Any, scaler: Any) -> Stepper:
        return self.engines[id(optimizer)]

    def free_memory(self) -> None:
        self.engines.clear()

    # --- data ---------------------------------------------------------------------------------------------------

    def data_shares(self) -> list[int]:
        ranks = range(self.state.num_processes)
        return [0 for _ in ranks] if "TOY_SHARES_DATA" in os.environ else list(ranks)

    def outputs(self) -> Outputs:
        last = self.state.process_index == self.state.num_processes - 1  # as of the stages of a pipeline
        return Outputs(last, last)

    # --- one step -----------------------------------------------------------------------------------------------

    def micro_batch(self, model: nn.Module, *, sync: bool) -> Any:
        return self._about(model, sync)

    @contextmanager
    def _about(self, model: nn.Module, sync: bool) -> Iterator[None]:
        """Whose backward it is going to be."""
        self.models.append((model, sync))
        try:
            yield
        finally:
            self.models.pop()

    def backward(self, loss: torch.Tensor, *, divide: bool = True, **kwargs: Any) -> None:
        scale = next((engine.loss_scale for engine in self.engines.values()), 1.0)
        (loss * scale).backward(**kwargs)
        assert all(sync == self.gradient_state.sync_gradients or sync for _, sync in self.models)
        for engine in self.engines.values():
            engine.take(divide=divide)

    def gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        wanted = set(map(id, parameters))
        return [total for e in self.engines.values() for key, total in e.sums.items() if key in wanted]

    def clip_grad_value_(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        self._exchange(parameters)
        super().clip_grad_value_(parameters, clip_value)

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        self._exchange(parameters)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def _exchange(self, parameters: list[torch.Tensor]) -> None:
        wanted = set(map(id, parameters))
        for engine in self.engines.values():
            if not wanted.isdisjoint(map(id, engine.parameters)):
                engine.exchange()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def weights(self, models: list[nn.Module]) -> list[dict[str, Any]]:
        return []  # the engine writes them itself

    def save(self, run: Run, weights: list[dict[str, Any]], *, safe: bool, main: bool, **kwargs: Any) -> Iterator[Part]:
        content = {
            "models": [self.state_dict(model) for model in run.models],
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "windows": [self.engines[id(optimizer)].window() for optimizer in run.optimizers],
        }
        yield File(f"toy_state_{run.rank}.bin", content)

    def load(self, run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        content = read_torch(reader.path(f"toy_state_{run.rank}.bin"), **torch_load)

        def rest() -> None:
            for model, weights in zip(run.models, content["models"], strict=True):
                self.unwrap(model).load_state_dict(weights)
            for optimizer, state in zip(run.optimizers, content["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            for optimizer, window in zip(run.optimizers, content["windows"], strict=True):
                self.engines[id(optimizer)].load_window(window)

        return StagedLoad(rest)
