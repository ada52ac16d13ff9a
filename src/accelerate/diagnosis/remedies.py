"""What to do about errors that torch raises, in the terms of this package: its own words are about torch's classes."""

from __future__ import annotations

_PREPARED = "accelerate: `prepare` has wrapped this model in DistributedDataParallel: "
_HANDLER = "`Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({}=True)])`"

# How the error reads, and the line that is added to it.
_REMEDIES = {
    "'DistributedDataParallel' object has no attribute": _PREPARED
    + "your attributes and methods are those of `accelerator.unwrap_model(model)`; for the loss, call `model(...)`.",
    "Expected to have finished reduction in the prior iteration": _PREPARED
    + f"to train with parameters that a loss may leave out, pass {_HANDLER.format('find_unused_parameters')}.",
    "Expected to mark a variable ready only once": _PREPARED
    + "if it checkpoints activations, let it do so with `use_reentrant=False`; if its graph is the same in every step, "
    + f"pass {_HANDLER.format('static_graph')}.",
}


def remedy(error: BaseException) -> str | None:
    """A line to add to an error of torch, if there is something to say."""
    if not isinstance(error, (AttributeError, RuntimeError)):
        return None
    text = str(error)
    return next((line for sign, line in _REMEDIES.items() if sign in text), None)
