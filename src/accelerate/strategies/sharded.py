"""What the engines share that hold pieces of parameters: checkpoints in shards, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.checkpoint import layout
from accelerate.checkpoint.gradients import read_gradients
from accelerate.checkpoint.model_weights import Fetch, check_fit
from accelerate.checkpoint.optimizer_keys import Names, to_names
from accelerate.checkpoint.parts import File, Part, StagedLoad
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.run_state import Run, unwrapped
from accelerate.checkpoint.sharded_state import Shards, read
from accelerate.comm import current
from accelerate.compilation import compile_regions_fsdp2
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.errors import CheckpointError
from accelerate.parallel.shards import spread_as, whole
from accelerate.precision.sharded import ShardedScaler
from accelerate.strategies.base import Strategy


class Sharded(Strategy):
    """An engine overrides how the pieces of a model and of an optimizer are got and put back."""

    places_models = True
    needs_even_batches = True
    saves_alone = False
    scaler_kind = ShardedScaler
    # Whether a process can take back gradients that it alone has accumulated; else all get their mean.
    takes_back = True
    plugin: FullyShardedDataParallelPlugin

    def compile_regions(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return compile_regions_fsdp2(model, **kwargs)

    def nonfinite(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        own = super().nonfinite(parameters)
        # The value may lie in the piece of one process, and another may have no piece at all. No other collective of a
        # step can tell: gradients go to the owners of their pieces, and a script need not ask for a norm. Where pieces
        # lie elsewhere, all have to talk through one backend.
        flag = torch.zeros((), device=self.device) if own is None else own.to(self.device)
        return current().all_reduce(flag, "max")

    def pieces(self, model: nn.Module) -> dict[str, Any]:
        """The state dict of a model, with tensors that know which piece this process has."""
        return unwrapped(model).state_dict()

    def put_pieces(self, model: nn.Module, pieces: dict[str, Any]) -> None:
        unwrapped(model).load_state_dict(pieces, strict=False)

    def same(self, model: nn.Module) -> list[set[str]]:
        """The names of each parameter of a model."""
        return names_of_each(unwrapped(model))

    def names(self, models: list[nn.Module], optimizer: Any) -> Names:
        """The names of an optimizer's parameters."""
        raise NotImplementedError

    def optimizer_pieces(self, models: list[nn.Module], optimizer: Any) -> dict[str, Any]:
        """The state dict of an optimizer, by the names of parameters, with pieces."""
        raise NotImplementedError

    def put_optimizer_pieces(self, models: list[nn.Module], optimizer: Any, content: dict[str, Any]) -> None:
        raise NotImplementedError

    # --- saving -------------------------------------------------------------------------------------------------

    def stream_weights(self, model: nn.Module) -> tuple[dict[str, Any], Fetch] | None:
        pieces = self.pieces(model)
        for names in self.same(model):
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
        if run.gradients is not None:
            exchanged = self.exchanged(run.models)
            if exchanged is not None:
                yield Shards(layout.gradient_shards(), "gradients", exchanged)
            yield File(layout.gradients(run.rank), self.waiting(run.models), True)

    # In the middle of a window, by names as those of `named_parameters`:

    def waiting(self, models: list[nn.Module]) -> dict[str, torch.Tensor]:
        """The gradients that this process has accumulated and not exchanged yet, as a whole."""
        raise NotImplementedError

    def exchanged(self, models: list[nn.Module]) -> dict[str, Any] | None:
        """The gradients that are exchanged already, in pieces; None, on all processes, where there are none."""
        raise NotImplementedError

    def put_gradients(
        self, models: list[nn.Module], waiting: dict[str, torch.Tensor], exchanged: dict[str, torch.Tensor]
    ) -> None:
        """Have these gradients, and no others. exchanged: as a whole, and the same on all processes."""
        raise NotImplementedError

    @property
    def gathers(self) -> bool:
        """Whether checkpoints hold whole models, put together on the first process."""
        return "FULL_STATE_DICT" in str(self.plugin.state_dict_type)

    def model_parts(
        self,
        model: nn.Module,
        number: int,
        *,
        gathers: bool,
        keep: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> Iterator[Part]:
        """The parts of a checkpoint for one model. keep: takes what shall be saved out of its state dict."""
        if not gathers:
            yield Shards(layout.model_shards(number), "model", keep(self.pieces(model)))
            return
        content = self.state_dict(model)
        if dist.get_rank() == 0:
            yield File(layout.gathered_model(number), keep(content))

    def optimizer_parts(self, models: list[nn.Module], optimizer: Any, number: int, *, gathers: bool) -> Iterator[Part]:
        """The parts of a checkpoint for one optimizer."""
        content = self.optimizer_pieces(models, _inner(optimizer))
        if not gathers:
            yield Shards(layout.optimizer_shards(number), "optimizer", content)
            return
        content = _gathered(content, dist.get_rank() == 0)
        if dist.get_rank() == 0:
            yield File(layout.optimizer(number), content)

    # --- loading ------------------------------------------------------------------------------------------------

    def load(self, run: Run, reader: CheckpointReader, *, torch_load: dict[str, Any], **kwargs: Any) -> StagedLoad:
        strict = kwargs.get("strict", True)
        models = [self.read_model(model, reader, number, strict) for number, model in enumerate(run.models_to_load)]
        optimizers = [
            self.read_optimizer(run.models, optimizer, reader, number)
            for number, optimizer in enumerate(run.optimizers)
        ]
        waiting, exchanged = read_gradients(run, reader, alike=not self.takes_back)

        def apply() -> None:
            for model, pieces in zip(run.models_to_load, models, strict=True):
                self.put_pieces(model, pieces)
            self.put_gradients(run.models, waiting, exchanged)
            for optimizer, content in zip(run.optimizers, optimizers, strict=True):
                self.put_optimizer_pieces(run.models, _inner(optimizer), content)

        return StagedLoad(apply)

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
        everything = self.pieces(model)
        own = everything if names is None else {stored: everything[name] for stored, name in names.items()}
        folder = layout.model_shards(number)
        if reader.has(folder):
            found = read(reader.folder / folder, lambda keys, size, dtype: _place(own.get(".".join(keys)), size, dtype))
        else:
            stored = reader.weights(_model_file(reader, number), {})
            found = {name: _cut(value, own.get(name)) for name, value in stored.items()}
        for twins in self.same(model):  # one name may be all that was stored
            stored_as = next((name for name in twins if name in found), None)
            if stored_as is not None:
                found |= {name: found[stored_as] for name in twins if name not in found}
        if strict:
            check_fit(model, own, found, reader.folder)
        return {(names or {}).get(name, name): value for name, value in found.items() if name in own}

    def read_optimizer(
        self, models: list[nn.Module], optimizer: Any, reader: CheckpointReader, number: int
    ) -> dict[str, Any]:
        """The pieces of an optimizer's state, by names, from whatever a checkpoint has of it."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners = [index for index, model in enumerate(models) if any(id(p) in own for p in model.parameters())]
        likes: dict[str, Any] = {}
        for index in owners:
            pieces = self.pieces(models[index])
            likes |= {f"{index}.{name}": value for name, value in pieces.items()}
            if len(owners) == 1:
                likes |= pieces

        def like(keys: tuple[Any, ...]) -> Any:
            return likes.get(keys[1]) if keys[0] == "state" else None

        folder = layout.optimizer_shards(number)
        if reader.has(folder):
            content = read(reader.folder / folder, lambda keys, size, dtype: _place(like(keys), size, dtype))
            return {"state": {}, **content}
        content = to_names(reader.content(layout.optimizer(number)), self.names(models, _inner(optimizer)))
        state = {
            name: {key: _cut(value, likes.get(name)) for key, value in values.items()}
            for name, values in content["state"].items()
        }
        return {**content, "state": state}


def names_of_each(model: nn.Module) -> list[set[str]]:
    """The names of each parameter of a model that has its own."""
    found: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    return list(found.values())


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _gathered(value: Any, keep: bool) -> Any:
    """Nested pieces put together, tensor by tensor; keep: on this process."""
    if isinstance(value, torch.Tensor):
        full = whole(value)
        return full.cpu() if keep else None
    if isinstance(value, dict):
        return {key: _gathered(item, keep) for key, item in value.items()}
    return [_gathered(item, keep) for item in value] if isinstance(value, list) else value


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
