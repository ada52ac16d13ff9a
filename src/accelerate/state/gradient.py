"""GradientState: is this batch one at which gradients are synchronized, and which loader did it come from."""

from __future__ import annotations

import weakref
from typing import Any

from accelerate.config.accumulation import GradientAccumulationPlugin
from accelerate.per_rank import PerRank, ThreadLocalSharedDict


class _Loaders:
    """The loaders being iterated, innermost last, without keeping them alive. One list for the whole rank:
    a batch comes from one loader, whoever accumulates its gradients."""

    def __init__(self) -> None:
        self._stack: PerRank[list[weakref.ref[Any]]] = PerRank(list)

    def push(self, loader: Any) -> None:
        stack = self._stack.get()
        if stack and stack[-1]() is loader:
            return
        self.remove(loader)
        stack.append(weakref.ref(loader))

    def remove(self, loader: Any) -> None:
        stack = self._stack.get()
        stack[:] = [ref for ref in stack if ref() is not None and ref() is not loader]

    def top(self) -> Any | None:
        stack = self._stack.get()
        while stack:
            loader = stack[-1]()
            if loader is not None:
                return loader
            stack.pop()
        return None

    def all(self) -> list[Any]:
        return [loader for loader in (ref() for ref in self._stack.get()) if loader is not None]

    def clear(self) -> None:
        self._stack.get().clear()


_loaders = _Loaders()


class GradientState:
    """Tell whether gradients are being synchronized, and hold the settings of accumulation.

    The first living `Accelerator` owns the shared state, so that `GradientState()` shows what it does. Every other one
    has a separate state.

    Args:
        gradient_accumulation_plugin: the settings.
    """

    _shared_state: Any = ThreadLocalSharedDict()

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    backwards: int
    # Of use on XLA only: whether gradients have been reduced already.
    is_xla_gradients_synced: bool = False
    _owner: weakref.ref[Any]

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self._start()
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @classmethod
    def owned_by(cls, owner: Any, plugin: GradientAccumulationPlugin) -> GradientState:
        """Return the gradient state of an accelerator: the shared one, unless another living accelerator owns it.

        Args:
            owner: the accelerator.
            plugin: its settings of accumulation.
        """
        state = cls()
        holder = state.__dict__.get("_owner", lambda: None)()
        if holder is not None and holder is not owner:
            state = cls.__new__(cls)
            state._start()
        state._owner = weakref.ref(owner)
        state.plugin_kwargs = plugin.to_kwargs()
        return state

    def _start(self) -> None:
        self.sync_gradients = True
        self.backwards = 0  # how many times `accelerator.backward` ran
        self.plugin_kwargs = {}

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    # It says where this process stands: a copy of an object that holds it shares it, here or in another process.
    def __deepcopy__(self, memo: dict[int, Any]) -> GradientState:
        return self

    def __reduce__(self) -> tuple[type[GradientState], tuple[()]]:
        return GradientState, ()

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()
        _loaders.clear()

    @property
    def initialized(self) -> bool:
        """Whether the state was set up."""
        return "sync_gradients" in self.__dict__

    @property
    def num_steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        return self.plugin_kwargs.get("num_steps") or 1

    @property
    def adjust_scheduler(self) -> bool:
        """The setting of that name in `GradientAccumulationPlugin`."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", True))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window, even if it is not full."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are averaged between ranks at every batch."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def active_dataloader(self) -> Any | None:
        """The loader that the current batch came from."""
        return _loaders.top()

    @property
    def dataloader_references(self) -> list[Any]:
        """Every loader that is being iterated, outermost first (None alone when there is none)."""
        return _loaders.all() or [None]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return _loaders.top() is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        loader = _loaders.top()
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The number of samples of the last global batch that are not repeats, or -1 if that is not known."""
        loader = _loaders.top()
        return -1 if loader is None else loader.remainder

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    # Called for every batch: nothing in between.
    _add_dataloader = staticmethod(_loaders.push)
    _remove_dataloader = staticmethod(_loaders.remove)
