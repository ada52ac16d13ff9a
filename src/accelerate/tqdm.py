"""A progress bar that is shown once."""

from __future__ import annotations

from typing import Any


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Create a `tqdm.auto` progress bar that is shown once per machine.

    Args:
        args: positional arguments of `tqdm`.
        main_process_only: show it on the first rank of each machine only.
        kwargs: keyword arguments of `tqdm`.
    """
    from accelerate.available import is_tqdm_available  # here, since `accelerate.utils` imports this file at once

    if not is_tqdm_available():
        raise ImportError("`accelerate.utils.tqdm` needs the package tqdm: `pip install tqdm`.")
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"The first argument of `tqdm` is what to iterate over, not {args[0]}; write `main_process_only={args[0]}`."
        )
    from tqdm.auto import tqdm as bar

    if main_process_only and not kwargs.get("disable", False):
        from accelerate.state import PartialState

        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)
