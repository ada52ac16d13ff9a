"""Questions about models, under their public path."""

from accelerate.checkpoint.weights import load_checkpoint_in_model
from accelerate.constants import SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from accelerate.modules import is_peft_model
from accelerate.precision import get_grad_scaler, get_mixed_precision_context_manager

__all__ = [
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "is_peft_model",
    "load_checkpoint_in_model",
]
