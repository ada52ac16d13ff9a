"""What one process may ask about the others and do with them, written once for every class that offers it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from accelerate.comm import Communicator, current
from accelerate.errors import a_kind_of

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: what a decorated function becomes on the ranks that should not run it.

    Args:
        args: ignored.
        kwargs: ignored.
    """
    return


class ProcessControl:
    """Needs `process_index`, `local_process_index` and `num_processes`; gives everything that follows from them."""

    process_index: int
    local_process_index: int
    num_processes: int

    @property
    def _communicator(self) -> Communicator:
        return current()

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank has reached this point."""
        if self.num_processes > 1:
            self._communicator.barrier()

    # Each is in the stack itself, and not only `_first`: the list of a hang has the name that the script has called.
    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process first, then on the others."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the first rank of each machine first, then on the others."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also when the block fails: the others must not wait for a process that has left.
            if first:
                self.wait_for_everyone()

    def split_between_processes(
        self,
        inputs: list[Any] | tuple[Any, ...] | dict[str, Any] | torch.Tensor | Any,
        apply_padding: bool = False,
    ) -> AbstractContextManager[Any]:
        """Give each rank its part of some inputs. The first ranks get one more if they do not divide evenly.

        Args:
            inputs: a list, tuple, tensor, `datasets.Dataset`, or a dict of those with equal lengths.
            apply_padding: repeat the last item so that all parts have the same length, to gather them afterwards.

        Returns:
            A context that gives the part of this rank.
        """
        return _Part(lambda: split_inputs(inputs, self.process_index, self.num_processes, apply_padding))

    def _only_if(self, chosen: bool, function: F) -> F:
        return function if chosen or self.num_processes == 1 else do_nothing  # type: ignore[return-value]

    def on_main_process(self, function: F | None = None) -> Any:
        """Decorate a function so that it runs on the main process only.

        Args:
            function: the function.
        """
        if function is None:
            return self.on_main_process
        return self._only_if(self.is_main_process, function)

    def on_local_main_process(self, function: F | None = None) -> Any:
        """Decorate a function so that it runs on the first rank of each machine only.

        Args:
            function: the function.
        """
        if function is None:
            return self.on_local_main_process
        return self._only_if(self.is_local_main_process, function)

    def on_last_process(self, function: F) -> F:
        """Decorate a function so that it runs on the last rank only.

        Args:
            function: the function.
        """
        return self._only_if(self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that it runs on one rank only.

        Args:
            function: the function.
            process_index: the rank.
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only_if(self.process_index == process_index, function)

    def on_local_process(
        self,
        function: F | None = None,
        local_process_index: int | None = None,
        *,
        local_process_idx: int | None = None,
    ) -> Any:
        """Decorate a function so that it runs on one rank of each machine only.

        Args:
            function: the function.
            local_process_index: the local rank.
            local_process_idx: the same, under the name that older documents use.
        """
        if local_process_index is None:
            local_process_index = local_process_idx
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only_if(self.local_process_index == local_process_index, function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine.

        Args:
            args: what to print.
            kwargs: keyword arguments of `print`.
        """
        if self.is_local_main_process:
            print(*args, **kwargs)


class _Part(ContextDecorator, AbstractContextManager[Any]):
    """What `split_between_processes` returns: the part of this rank, in a `with`."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take = take

    def __enter__(self) -> Any:
        return self._take()

    def __exit__(self, *failure: object) -> None: ...

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "`split_between_processes` is for a `with`: `with accelerator.split_between_processes(inputs) as part:`."
        )


def split_inputs(inputs: Any, index: int, count: int, apply_padding: bool = False) -> Any:
    """Part `index` of `count` parts of `inputs`."""
    if count == 1:
        return inputs
    if isinstance(inputs, Mapping):
        for value in inputs.values():
            _refuse_whole(value)
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"All values of a dict to split must be equally long, but their lengths are {lengths}.")
        return type(inputs)(  # type: ignore[call-arg]
            {key: split_inputs(value, index, count, apply_padding) for key, value in inputs.items()}
        )
    _refuse_whole(inputs)
    share, extras = divmod(len(inputs), count)
    start = index * share + min(index, extras)
    end = start + share + (index < extras)
    missing = share + bool(extras) - (end - start) if apply_padding else 0
    if hasattr(inputs, "select") and not hasattr(inputs, "to"):  # a datasets.Dataset
        last = len(inputs) - 1
        return inputs.select([*range(start, end), *[last] * (missing if last >= 0 else 0)])
    part = inputs[start:end]
    if missing and len(inputs):
        last = end - 1 if end > start else len(inputs) - 1
        if isinstance(inputs, (list, tuple)):
            return part + inputs[last : last + 1] * missing
        return inputs[[*range(start, end), *[last] * missing]]  # tensors and arrays take a list of indices
    return part


def _refuse_whole(inputs: Any) -> None:
    """Raise for what has no parts to share: each process would do all of the work."""
    has_parts = not isinstance(inputs, (str, bytes))
    if not (has_parts and hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")):
        how = "list(inputs)" if has_parts and hasattr(inputs, "__iter__") else "[inputs]"
        raise TypeError(
            f"`split_between_processes` was given {a_kind_of(inputs)}, which cannot be cut into parts: pass a list, as "
            f"in `{how}`."
        )
