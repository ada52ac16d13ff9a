"""torch.optim: whether an optimizer has hooks for loading, whether it unscales gradients itself, whether it stepped."""

from __future__ import annotations

from typing import Any


def has_load_hooks(optimizer: Any) -> bool:
    """Whether hooks of an optimizer run before or after `load_state_dict`.

    Every optimizer counts as one with hooks where torch does not tell: it gets whole tensors, which takes longer.
    """
    try:
        return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)
    except AttributeError:
        return True


def decides_on_the_device(optimizer: Any) -> bool:
    """Whether the step of an optimizer is called in any case, and is itself what skips infinite gradients.

    Without torch's mark those count as such that were asked to be fused.
    """
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        return True
    return any(group.get("fused") for group in optimizer.param_groups)


def takes_found_inf(optimizer: Any) -> bool:
    """Whether an optimizer leaves a step out by itself if it is told so on the device; none does without torch's mark.

    Also one of somebody else may have groups with `fused`, and take no notice.
    """
    marked = hasattr(optimizer, "_step_supports_amp_scaling")
    return marked and all(group.get("fused") for group in optimizer.param_groups)


def call_stepped(optimizer: Any) -> None:
    """Have a scheduler take an optimizer for one that has stepped; without torch's mark it warns once."""
    optimizer._opt_called = True
