"""Models that are bigger than a device: without weights first, then mapped, loaded and run where there is room.

Names are imported when they are first used: this package and `accelerate.hooks` need each other.
"""

from __future__ import annotations

from accelerate.lazy import lazy

_NAMES = {
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING": "accelerate.constants",
    "attach_layerwise_casting_hooks": "accelerate.big_modeling.casting",
    "check_device_map": "accelerate.big_modeling.check",
    "cpu_offload": "accelerate.big_modeling.offload",
    "cpu_offload_with_hook": "accelerate.big_modeling.offload",
    "disk_offload": "accelerate.big_modeling.offload",
    "dispatch_model": "accelerate.big_modeling.dispatch",
    "init_empty_weights": "accelerate.big_modeling.meta",
    "init_on_device": "accelerate.big_modeling.meta",
    "load_checkpoint_and_dispatch": "accelerate.big_modeling.dispatch",
}

__all__ = sorted(_NAMES)

__getattr__, __dir__ = lazy(__name__, _NAMES)
