"""megatron-core on a CPU: what it asks of `torch.cuda` is answered by the host. For tests alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_installed = False


def _on_host(device: Any) -> Any:
    """A device of CUDA, by number or by name, as the CPU."""
    if (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda"):
        return torch.device("cpu")
    return device


class _HostMode(TorchFunctionMode):
    """Tensors that are made on, or moved to, a GPU are on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_host(kwargs["device"])
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = tuple(_on_host(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args)
        if function is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Clipping asks for gradients on a GPU by the names of their types.
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)

    def _backward(self, tensors: Any, grad_tensors: Any = None, **kwargs: Any) -> None:
        """The engine itself: what is computed anew in a backward is on the CPU, too."""
        every = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) * len(every) if isinstance(grad_tensors, (torch.Tensor, type(None))) else grad_tensors
        grads = tuple(torch.ones_like(t) if g is None else g for t, g in zip(every, given, strict=True))
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                every, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
            )


class _Nothing:
    """Stands for streams and events, which the host has not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: Any) -> None: ...


def _set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def install() -> None:
    """From here on, for the whole process. Before anything of megatron-core is made."""
    global _installed
    if _installed:
        return
    _installed = True
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "_lazy_init"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    for name in ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = cuda.stream = lambda *args, **kwargs: _Nothing()
    cuda.get_rng_state, cuda.set_rng_state = _get_state, _set_state
    cuda.manual_seed = cuda.manual_seed_all = _seed
    cuda.initial_seed = torch.initial_seed
    cuda.default_generators = [torch.default_generator]
    _HostMode().__enter__()
    import megatron.core.tensor_parallel.random as drawing

    drawing._get_cuda_rng_state, drawing._set_cuda_rng_state = _get_state, _set_state
